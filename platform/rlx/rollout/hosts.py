"""What answers the turns of rollouts: environments in this process or in others, and tools."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from rlx.plugin import Action, Environment, Step
from rlx.rollout.tools import CallFault, combine_results
from rlx.text import replace_surrogates

_MAX_OBSERVATION = 1_000_000
"""Maximum characters of an observation, and of a turn's info as JSON."""


@dataclass(frozen=True, slots=True)
class HostFault:
    """A fault of an environment, in words."""

    reason: str


Method = Literal["reset", "step"]


class EnvironmentHost(ABC):
    """Runs an environment. A host that answers each call when it is over, while others run,
    overrides `submit` and `collect`.

    Attributes:
        patience: seconds that a turn waits for others to be sampled with; None: for all of them.
    """

    patience: float | None = None

    @abstractmethod
    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        """Initial states for (problem, seed) pairs; a `HostFault` in place of one that failed."""

    @abstractmethod
    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        """The environment's answers to (state, action) pairs, in order."""

    def release(self, states: Sequence[Any]) -> None:  # noqa: B027
        """Frees the last states of rollouts that end before the environment says so."""

    def submit(self, number: int, what: Method, arguments: tuple[Any, Any]) -> None:
        """Begins a call, with the arguments of one in `reset` or `step`."""
        self._begun[what][number] = arguments

    def collect(self, seconds: float | None) -> list[tuple[int, Any]]:
        """Numbers and answers of calls that are over; waits at most so many seconds for the first,
        or, with None, until there is one."""
        answers: list[tuple[int, Any]] = []
        for what, run in (("reset", self.reset), ("step", self.step)):
            calls, self._begun[what] = self._begun[what], {}
            if calls:
                answers += zip(calls, run(list(calls.values())), strict=True)
        return answers

    @cached_property
    def _begun(self) -> dict[str, dict[int, tuple[Any, Any]]]:
        return {"reset": {}, "step": {}}


class ToolHost(EnvironmentHost):
    """Answers turns with calls of tools by an environment `tools`: each call apart, so that one
    that hangs or crashes is the fault of no other, and its fault is its result."""

    def __init__(self, host: EnvironmentHost) -> None:
        self._host = host

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        return [None for _ in calls]

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        apart = [(s, replace(a, calls=(call,))) for s, a in calls for call in a.calls]
        results = map(_read_result, self._host.step(apart))
        return [combine_results(a, list(islice(results, len(a.calls)))) for _, a in calls]


def _read_result(answer: Step | HostFault) -> tuple[str, CallFault]:
    if isinstance(answer, HostFault):
        return f"error: {answer.reason}", "failed"
    (result,) = answer.results
    fault: CallFault = "invalid" if answer.info["invalid"] else "failed"
    return result, fault if answer.info["invalid"] or answer.info["failed"] else ""


class LocalHost(EnvironmentHost):
    """Runs an environment in the calling process, without catching its exceptions."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        return [self._environment.reset(problem, seed) for problem, seed in calls]

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        kinds = self._environment.kinds
        return [
            check_environment_step(self._environment.step(state, action), kinds)
            for state, action in calls
        ]

    def release(self, states: Sequence[Any]) -> None:
        for state in states:
            self._environment.release(state)


def check_environment_step(step: Any, kinds: Sequence[str]) -> Step:
    """Returns a plain copy of an environment's step, without lone surrogates.

    Raises:
        ValueError: it does not match `Step`.
    """
    if not isinstance(step, Step):
        raise ValueError(f"gave {type(step).__name__} instead of a Step")
    if step.kind not in kinds:
        raise ValueError(f"gave a turn of kind {step.kind!r}; its kinds are {', '.join(kinds)}")
    if not isinstance(step.observation, str) or len(step.observation) > _MAX_OBSERVATION:
        raise ValueError(
            f"gave an observation that is not text of at most {_MAX_OBSERVATION} characters"
        )
    if not (step.anchor is None or isinstance(step.anchor, str)):
        raise ValueError(f"gave {type(step.anchor).__name__} as an anchor, not text")
    if step.player not in (0, 1):
        raise ValueError(f"gave {step.player!r} as the next player, which is 0 or 1")
    return Step(
        kind=str(step.kind),
        state=step.state,
        observation=replace_surrogates(str(step.observation)),
        done=bool(step.done),
        info=copy_info(step.info, "info"),
        anchor=None if step.anchor is None else replace_surrogates(str(step.anchor)),
        player=int(step.player),
        opponent_info=copy_info(step.opponent_info, "opponent_info"),
        results=tuple(replace_surrogates(str(result)) for result in step.results),
    )


def copy_info(info: Any, what: str) -> dict[str, Any]:
    """Returns a copy of what is reported on a turn.

    Raises:
        ValueError: it is no mapping of plain JSON, or too long.
    """
    if not isinstance(info, Mapping):
        raise ValueError(f"gave {type(info).__name__} as {what}")
    try:
        text = json.dumps(dict(info), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"gave {what} that is not plain JSON: {error}") from error
    if len(text) > _MAX_OBSERVATION:
        raise ValueError(f"gave {what} of {len(text)} characters")
    copied: dict[str, Any] = json.loads(replace_surrogates(text))
    return copied
