"""Tasks, which provide problems and worked demonstrations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from rlx.text import replace_surrogates

Split = Literal["train", "test"]

CONFIDENCES = tuple(str(step / 20) for step in range(21))
"""Confidences from 0.0 to 1.0 in steps of .05, as texts: the values of tasks that name none."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a dialogue before the policy's first turn: an example, or what was said."""

    role: Literal["user", "assistant"]
    content: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", replace_surrogates(self.content))


def describe_message_order(roles: Sequence[str]) -> str:
    """Says what is wrong with the order of messages before a prompt; "" if nothing is."""
    expected = ["user", "assistant"] * (len(roles) // 2)
    if list(roles) == expected:
        return ""
    return f"messages before the prompt are user, assistant, user, ...; got {', '.join(roles)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem, with everything needed to score an answer.

    Lone surrogates in its texts become U+FFFD, because no model, file or database takes them.

    Attributes:
        id: stable across runs, so that two runs can be compared on the same problem.
        system: a system message; "" uses the experiment's.
        history: messages between the system message and the prompt, user and assistant in turns.
        allow_control_tokens: whether names of control tokens in `prompt`, `history` and `system`,
            such as `<|im_end|>`, become control tokens. Otherwise they are broken up, as in
            observations.
        fields: the task's record (ground truth, `data_source`, ...), plain JSON values.
        stratum: a coarse difficulty label, known before any answer; "" if there is none.
            Calibration metrics are also reported per stratum.
    """

    id: str
    prompt: str
    fields: Mapping[str, Any]
    stratum: str = ""
    system: str = ""
    allow_control_tokens: bool = False
    history: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        if wrong := describe_message_order([message.role for message in self.history]):
            raise ValueError(wrong)
        for name in ("id", "prompt", "stratum", "system"):
            object.__setattr__(self, name, replace_surrogates(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A worked episode for warm starts: the texts of its turns, in order, without their prompts."""

    turns: tuple[str, ...]


@runtime_checkable
class Task(Protocol):
    """A source of problems. `problem` is a pure function, so that resuming needs only a cursor.

    A task that reads files overrides `Plugin.check`, so that a bad file stops `rlx submit`.
    """

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` (from 0) of a split. Train and test share no problem."""
        ...

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns a worked solution, good or poor, for supervised warm starts.

        A task that has none raises NotImplementedError, and sets a class variable or property
        `demonstrates` to False, so that validation rejects `warm_start`.
        """
        ...


@runtime_checkable
class ListsProblems(Protocol):
    """A task whose problems are known before a run, such as those of files: rewards check each."""

    def list_problems(self) -> Iterable[tuple[str, Problem]]:
        """Yields every problem of both splits, and where it comes from: `train.jsonl line 3`."""
        ...


@runtime_checkable
class Corrupts(Protocol):
    """A task that can corrupt a sentence of reasoning; probes with the scheme `mistake` need it."""

    def corruption(self, sentence: str, seed: int) -> str | None:
        """Returns the sentence with one error introduced; None if it has nothing to corrupt."""
        ...


@runtime_checkable
class Canonical(Protocol):
    """A task whose answers have several equivalent forms."""

    def canonical(self, answer: str) -> str:
        """Returns a text that is the same for equivalent answers."""
        ...


@runtime_checkable
class StatesConfidence(Protocol):
    """A task that says which confidences a response can state; `loss.expected` sums over them."""

    @property
    def confidence_values(self) -> Sequence[str]:
        """The confidences as texts, such as `("0.0", "0.5", "1.0")`, each a number in [0, 1]."""
        ...


def get_confidence_values(task: object) -> tuple[str, ...]:
    return tuple(task.confidence_values) if isinstance(task, StatesConfidence) else CONFIDENCES


@runtime_checkable
class StandsIn(Protocol):
    """A task that has problems to plan with where its data files are missing."""

    @property
    def stand_ins(self) -> str:
        """What these problems are, in a few words; "" if the options need no data files."""
        ...

    def stand_in(self, index: int, seed: int) -> Problem:
        """Returns problem number `index` (from 0), with the fields of those in the files."""
        ...


@runtime_checkable
class Rehearsed(Protocol):
    """A task whose warm start is played in the experiment's own environment.

    The environment answers a scripted policy exactly as it answers the model, so both see the same
    text. `lesson` and `act` replace `demonstration` for the schedule `environment`. A class
    variable or property `demonstrates` that is False means that there are no lessons either, so
    that validation rejects `warm_start`.
    """

    def lesson(self, index: int, seed: int) -> Problem:
        """Returns problem number `index` (from 0) of the warm start, never a test problem."""
        ...

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        """Returns the next turn of an episode, good or poor, after these turns and the observation
        that followed each; `seed` is the same for all turns of one episode."""
        ...
