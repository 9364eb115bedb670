"""Hosts that run an environment, and the validation of its steps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlx.plugin import Action, Environment, Step
from rlx.text import replace_surrogates

__all__ = ["EnvironmentHost", "HostFault", "LocalHost", "check_environment_step"]

_LONGEST = 1_000_000
"""Maximum characters of an observation, and of a turn's info as JSON."""


@dataclass(frozen=True, slots=True)
class HostFault:
    """A fault of an environment, in words."""

    reason: str


class EnvironmentHost(Protocol):
    """Runs an environment."""

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        """Initial states for (problem, seed) pairs; a `HostFault` in place of one that failed."""
        ...

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        """The environment's answers to (state, action) pairs, in order."""
        ...


class LocalHost:
    """Runs an environment in the calling process, without catching its exceptions."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        """See `EnvironmentHost`."""
        return [self._environment.reset(problem, seed) for problem, seed in calls]

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        """See `EnvironmentHost`."""
        kinds = self._environment.kinds
        return [
            check_environment_step(self._environment.step(state, action), kinds)
            for state, action in calls
        ]


def check_environment_step(step: Any, kinds: Sequence[str]) -> Step:
    """Returns a plain copy of an environment's step, also if it is a subclass.

    Lone surrogates in its texts become U+FFFD: they may come from the model's text, and must not
    end the run.

    Raises:
        ValueError: it does not match `Step`.
    """
    if not isinstance(step, Step):
        raise ValueError(f"gave {type(step).__name__} instead of a Step")
    if step.kind not in kinds:
        raise ValueError(f"gave a turn of kind {step.kind!r}; its kinds are {', '.join(kinds)}")
    if not isinstance(step.observation, str) or len(step.observation) > _LONGEST:
        raise ValueError(f"gave an observation that is not text of at most {_LONGEST} characters")
    if not (step.anchor is None or isinstance(step.anchor, str)):
        raise ValueError(f"gave {type(step.anchor).__name__} as an anchor, not text")
    if step.player not in (0, 1):
        raise ValueError(f"gave {step.player!r} as the next player, which is 0 or 1")
    return Step(
        kind=str(step.kind),
        state=step.state,
        observation=replace_surrogates(str(step.observation)),
        done=bool(step.done),
        info=_copy_info(step.info, "info"),
        anchor=None if step.anchor is None else replace_surrogates(str(step.anchor)),
        player=int(step.player),
        opponent_info=_copy_info(step.opponent_info, "opponent_info"),
    )


def _copy_info(info: Any, what: str) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise ValueError(f"gave {type(info).__name__} as {what}")
    try:
        text = json.dumps(dict(info), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"gave {what} that is not plain JSON: {error}") from error
    if len(text) > _LONGEST:
        raise ValueError(f"gave {what} of {len(text)} characters")
    copied: dict[str, Any] = json.loads(replace_surrogates(text))
    return copied
