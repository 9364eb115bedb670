"""Environments: what answers a policy between its turns."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlx.plugin.base import Plugin

__all__ = ["FAILED", "Action", "Environment", "Episode", "Step"]

FAILED = "failed"
"""Kind of a turn that its environment gave no answer to; no environment's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One turn of the policy, as an environment sees it. Text is the model's own and untrusted.

    Attributes:
        text: of this turn alone.
        spans: text inside each named span that was found.
        number: of the turn in its rollout, from 1.
        turns_left: regular turns that may follow this one.
        forced: this is the forced answer turn, behind the last regular one.
        finish_reason: "stop", or "length" when the token budget ran out.
    """

    text: str
    spans: Mapping[str, str] = field(default_factory=dict)
    number: int = 1
    turns_left: int = 0
    forced: bool = False
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment makes of an action.

    Attributes:
        kind: what the turn was: one of the environment's `kinds`.
        state: for the next step; plain values that can be sent to another process.
        observation: text that the policy is shown before its next turn.
        done: the rollout has ended.
        info: plain JSON about the turn, kept with it; rewards read it as `Sample.info`. Its
            booleans, numbers and short words are counted over a step's turns.
        anchor: a name for the state that the next turn begins in; turns of one prompt that begin
            in the same one can be compared (GiGPO). None: the observation's tokens decide.
    """

    kind: str
    state: Any = None
    observation: str = ""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    anchor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A rollout as its environment's author promises it: gold, poor or hostile.

    `rlx plugins check` plays it, and makes hostile turns of its own for its problem.

    Attributes:
        name: what it shows, such as "gold" or "out of patience"; one environment's names differ.
        problem: the task's record, or as much of it as `reset` reads.
        turns: what the policy says.
        kinds: what each of the turns then is.
        done: whether the last of them ends the rollout; no other does.
        observations: what is shown after each turn; empty where that is not promised.
        spans: tags whose contents `Action.spans` has.
        options: of the plugin, as YAML would give them.
    """

    name: str
    problem: Mapping[str, Any]
    turns: tuple[str, ...]
    kinds: tuple[str, ...]
    done: bool = True
    observations: tuple[str, ...] = ()
    spans: tuple[str, ...] = ("think", "answer")
    options: Mapping[str, Any] = field(default_factory=dict)


class Environment(Plugin, ABC):
    """Base of environments; subclasses write `reset` and `step`, both of them pure functions.

    rlx keeps the state between steps and calls them in worker processes, each call under a
    deadline, for all rollouts that are still going on. What a rollout is shown depends on its
    problem, its seed and its own turns, whatever its batch-mates do.

    Attributes:
        kinds: every kind of turn that `step` may report; `rewards.turn.NAME.turn` names one.
        examples: what its author promises of it.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[Episode, ...]] = ()

    @abstractmethod
    def reset(self, problem: Mapping[str, Any], seed: int) -> Any:
        """Returns the state that a rollout begins in.

        Args:
            problem: the task's record, `Problem.fields`.
            seed: of this rollout.
        """

    @abstractmethod
    def step(self, state: Any, action: Action) -> Step:
        """Answers one turn."""
