"""The task `textarena`: the beginnings of games."""

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rlx.plugin import Demonstration, Problem, Split
from rlx_gyms.libraries import NeedsLibrary, is_installed
from rlx_gyms.textarena.games import open_game, read_observation

__all__ = ["TextArenaTask"]

_ATTEMPTS = 1000


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
        rng = random.Random(f"textarena/{seed}/{split}/{index}")
        varies, fault = self._show(0) != self._show(1), ""
        for _ in range(_ATTEMPTS):
            drawn = rng.getrandbits(31)
            try:
                shown = self._show(drawn)
            except ValueError as error:  # some seeds of LightsOut divide by zero
                fault = f"; {error}"
                continue
            identity = shown if varies else str(drawn)
            if (zlib.crc32(identity.encode()) % self.held_out == 0) == (split == "test"):
                return self._build_problem(shown, identity, drawn)
        raise ValueError(
            f"{self.id}: none of {_ATTEMPTS} beginnings is for the split {split!r}{fault}"
        )

    def _show(self, seed: int) -> str:
        return _show_beginning(self.id, self._config_text, self.players, seed)

    def _build_problem(self, shown: str, identity: str, drawn: int) -> Problem:
        return Problem(
            id=f"textarena/{self.id}/{zlib.crc32(identity.encode()):08x}/{drawn}",
            prompt=self.prompt.replace("{observation}", shown),
            fields={
                "data_source": self.id,
                "id": self.id,
                "config": self._config_text,
                "players": self.players,
                "seed": drawn,
            },
        )

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
    return read_observation(open_game(id, config, players, seed), 0)
