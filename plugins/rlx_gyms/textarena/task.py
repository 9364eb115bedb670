"""The task `textarena`: the beginnings of games."""

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rlx.plugin import Demonstration, Problem, Split
from rlx_gyms.beginnings import draw_beginning
from rlx_gyms.libraries import NeedsLibrary, is_installed
from rlx_gyms.textarena.games import open_game, read_observation

__all__ = ["TextArenaTask"]


class TextArenaTask(NeedsLibrary):
    """Beginnings of a game of TextArena, by name: `id: GuessTheNumber-v0`.

    The prompt is what the game shows first, and its hash decides whether it is for training or for
    testing. A game that always begins with the same text is split by its seed. The environment is
    `textarena`, the reward of a game `info` with `key: return`.
    """

    library: ClassVar[str] = "textarena"

    id: str = "LightsOut-v0"
    """Name of the game, without the suffix of a wrapper."""
    config: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the game, such as `{max_turns: 5}`."""
    players: int = Field(1, ge=1, le=2)
    """Number of players; the environment's `opponent` plays the second."""
    held_out: int = Field(3, ge=2)
    """One in `held_out` beginnings is held out for testing."""
    prompt: str = "{observation}"
    """The prompt; `{observation}` is what the game shows first."""
    moves: tuple[str, ...] = ()
    """Moves that a warm start draws from at random, which teaches their form and nothing else."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if is_installed("textarena"):  # otherwise `check` says so
            open_game(self.id, self._config_text, self.players, 0)
        return self

    @property
    def _config_text(self) -> str:
        return json.dumps(dict(self.config), sort_keys=True)

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` of a split; the same for the same arguments.

        Raises:
            ImportError: textarena is missing.
            ValueError: no beginning is for this split.
        """
        # Some seeds of LightsOut divide by zero: they are passed over.
        key = f"textarena/{self.id}/{seed}/{split}/{index}"
        beginning = draw_beginning(key, split, self.held_out, self._show)
        return Problem(
            id=f"textarena/{self.id}/{zlib.crc32(beginning.identity.encode()):08x}/{beginning.seed}",
            prompt=self.prompt.replace("{observation}", beginning.shown),
            fields={
                "data_source": self.id,
                "id": self.id,
                "config": self._config_text,
                "players": self.players,
                "seed": beginning.seed,
            },
        )

    def _show(self, seed: int) -> str:
        return _show_beginning(self.id, self._config_text, self.players, seed)

    @property
    def demonstrates(self) -> bool:
        """Whether there are moves to show, which `warm_start` needs."""
        return bool(self.moves)

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns a random first move, for schedules without environment.

        Raises:
            NotImplementedError: the option `moves` is not set.
        """
        if not self.moves:
            raise NotImplementedError("task.moves lists the moves of a warm start")
        return Demonstration((self.act(problem, (), (), seed),))

    def lesson(self, index: int, seed: int) -> Problem:
        """Returns problem number `index` of the warm start.

        Raises:
            NotImplementedError: the option `moves` is not set.
        """
        if not self.moves:
            raise NotImplementedError("task.moves lists the moves of a warm start")
        return self.problem("train", index, seed)

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        """Returns a random move."""
        return random.Random(f"textarena/act/{seed}/{len(turns)}").choice(self.moves)


@lru_cache(maxsize=4096)
def _show_beginning(id: str, config: str, players: int, seed: int) -> str:
    game = open_game(id, config, players, seed)
    return read_observation(game, game.first_player)
