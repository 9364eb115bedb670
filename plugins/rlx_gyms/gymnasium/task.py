"""The task `gymnasium`: where an episode of an environment begins."""

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlx.plugin import Demonstration, Problem, Split
from rlx_gyms.gymnasium.games import format_observation, list_action_names, open_game, set_start
from rlx_gyms.libraries import NeedsLibrary, is_installed

__all__ = ["GymnasiumTask"]

_ATTEMPTS = 1000


class GymnasiumTask(NeedsLibrary):
    """First states of an environment of Gymnasium with discrete actions, such as FrozenLake-v1.

    The prompt is the first observation, and its hash decides whether it is for training or for
    testing. The environment is `gymnasium`, its return the reward `info` with `key: return`.
    """

    library: ClassVar[str] = "gymnasium"

    id: str = "FrozenLake-v1"
    """Name of the environment, as for `gymnasium.make`."""
    config: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`, such as `{map_name: 8x8}`."""
    starts: Literal["any", "reset"] = "any"
    """`any`: every state of a tabular environment in which an episode goes on; `reset`: the states
    that the environment itself begins in."""
    held_out: int = Field(3, ge=2)
    """One in `held_out` first observations is held out for testing."""
    prompt: str = "{observation}\n"
    """The prompt; `{observation}` is the state as numbers, `{actions}` the names of the actions."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if is_installed("gymnasium"):  # otherwise `check` says so
            starts = _list_starts(self.id, self._config_text)
            if self.starts == "any" and not starts:
                raise ValueError(f"{self.id} is not tabular: it needs `starts: reset`")
        return self

    @property
    def _config_text(self) -> str:
        return json.dumps(dict(self.config), sort_keys=True)

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` of a split; the same for the same arguments.

        Raises:
            ImportError: gymnasium is missing.
            ValueError: no first observation is for this split.
        """
        rng = random.Random(f"gymnasium/{seed}/{split}/{index}")
        starts = _list_starts(self.id, self._config_text) if self.starts == "any" else ()
        for _ in range(_ATTEMPTS):
            start = rng.choice(starts) if starts else None
            drawn = 0 if starts else rng.getrandbits(31)
            shown = _show_start(self.id, self._config_text, start, drawn)
            if (zlib.crc32(shown.encode()) % self.held_out == 0) == (split == "test"):
                return self._build_problem(shown, start, drawn)
        raise ValueError(
            f"{self.id}: none of {_ATTEMPTS} first observations falls into the split {split!r}; "
            "`starts: any` begins in every state of a tabular environment, and `held_out` decides "
            "the share of the splits"
        )

    def _build_problem(self, shown: str, start: int | None, drawn: int) -> Problem:
        actions = "|".join(_list_actions(self.id, self._config_text))
        return Problem(
            id=f"gymnasium/{self.id}/{shown}",
            prompt=self.prompt.replace("{observation}", shown).replace("{actions}", actions),
            fields={
                "data_source": self.id,
                "id": self.id,
                "config": self._config_text,
                "start": start,
                "seed": drawn,
            },
        )

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns a random first action, for schedules without environment."""
        return Demonstration((self.act(problem, (), (), seed),))

    def lesson(self, index: int, seed: int) -> Problem:
        """Returns problem number `index` of the warm start."""
        return self.problem("train", index, seed)

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        """Returns a random action: a warm start teaches the names of actions and nothing else."""
        rng = random.Random(f"gymnasium/act/{seed}/{len(turns)}")
        return rng.choice(_list_actions(self.id, self._config_text))


@lru_cache(maxsize=16)
def _list_actions(id: str, config: str) -> tuple[str, ...]:
    return list_action_names(id, int(open_game(id, config).action_space.n))


@lru_cache(maxsize=16)
def _list_starts(id: str, config: str) -> tuple[int, ...]:
    """The states of a tabular environment in which an episode goes on; () for another."""
    table = getattr(open_game(id, config), "P", None)
    if table is None:
        return ()
    return tuple(
        state
        for state, actions in table.items()
        if any(not ended or s != state for moves in actions.values() for _, s, _, ended in moves)
    )


@lru_cache(maxsize=4096)
def _show_start(id: str, config: str, start: int | None, seed: int) -> str:
    return format_observation(set_start(open_game(id, config), start, seed))
