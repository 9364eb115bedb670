"""Tasks: where problems come from, and what worked episodes of them look like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = [
    "Canonical",
    "Corrupts",
    "Demonstration",
    "Problem",
    "Rehearsed",
    "Split",
    "Task",
]

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to ask, with all that is needed to score an answer.

    Attributes:
        id: the same for the same problem in every run, so that two runs can be compared on it.
        prompt: the text to show to the model.
        system: a system message; "" leaves it to the experiment.
        fields: the task's record (ground truth, `data_source`, ...), plain JSON values.
        stratum: a coarse label of difficulty known before any answer; "" where there is none.
            Calibration figures are also given within each stratum.
    """

    id: str
    prompt: str
    fields: Mapping[str, Any]
    stratum: str = ""
    system: str = ""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A worked episode for warm starts: the texts of the turns, in order, without their prompts."""

    turns: tuple[str, ...]


@runtime_checkable
class Task(Protocol):
    """A source of problems. `problem` is a pure function: a cursor is all that resuming needs.

    A task that reads files overrides `Plugin.check`, so that a bad file stops `rlx submit`.
    """

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` (from 0) of a split. Train and test share no problem."""
        ...

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns a worked solution, good or poor, for supervised warm starts.

        Raises:
            NotImplementedError: the task has none. It says so beforehand by a class variable or
                property `demonstrates` that is False, so that `warm_start` is refused when read.
        """
        ...


@runtime_checkable
class Corrupts(Protocol):
    """A task that can spoil a sentence of reasoning; probes of the scheme `mistake` ask for it."""

    def corruption(self, sentence: str, seed: int) -> str | None:
        """Returns the sentence with one thing made wrong; None where it has nothing to spoil."""
        ...


@runtime_checkable
class Canonical(Protocol):
    """A task whose answers can be written in several ways."""

    def canonical(self, answer: str) -> str:
        """Returns a text that is the same for answers that say the same."""
        ...


@runtime_checkable
class Rehearsed(Protocol):
    """A task whose warm start is acted out in the experiment's own environment.

    The environment answers a scripted policy as it will answer the model, so the text of both is
    the same. What `demonstration` is to other schedules, `lesson` and `act` are to `environment`.
    A class variable or property `demonstrates` that is False says that there are no lessons either,
    so that `warm_start` is refused when read.
    """

    def lesson(self, index: int, seed: int) -> Problem:
        """Returns problem number `index` (from 0) of the warm start; none of them is a test one.

        Raises:
            NotImplementedError: the task's options leave it without any.
        """
        ...

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        """Returns the next turn of an episode, good or poor.

        Args:
            problem: from `lesson`, or from `problem`: `rlx plan` shows those.
            turns: texts of the turns so far.
            observations: what the environment showed after each of them.
            seed: the same for all turns of one episode.
        """
        ...
