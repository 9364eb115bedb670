"""Settings of a schedule: which turns a rollout has, how each is sampled, and by which function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from rlx.plugin.base import Count, Plugin, StrictModel
from rlx.plugin.task import Message

ANSWER = "answer"
"""Kind of the turns that answer the problem, where a schedule has several kinds."""


class TurnSpec(StrictModel):
    """Prompt template and sampling parameters of one kind of turn."""

    template: str = "{prompt}"
    """Text shown before the turn; `{prompt}` is replaced by the problem's prompt. If it is empty
    for a turn after the first, the turn continues the previous one in the same message."""
    prefix: str = ""
    """How the policy's message begins, such as `<answer>`: given, not sampled, and never learned.
    It is part of the turn's text."""
    max_new_tokens: Count = Field(256, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Count = Field(0, ge=0)
    """0 disables top-k."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop strings: the turn ends with the first one, which is included in the turn's text."""
    spans: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")], ...] = ()
    """Names of tags, `<name>...</name>`, whose contents and delimiters are recorded."""


@dataclass(frozen=True, slots=True)
class TurnLevel:
    """`count` turns of one kind below every turn of the previous level.

    `at` is where `turn` stands in the `rollout:` section, such as `("levels", 1)`, and `counted_at`
    where `count` does.
    """

    kind: str
    count: int
    turn: TurnSpec
    at: tuple[str | int, ...] = ()
    counted_at: tuple[str | int, ...] = ()

    @property
    def key(self) -> str:
        """Key path of the turn's settings in an experiment, such as `rollout.levels.1`."""
        return ".".join(map(str, ("rollout", *self.at)))

    @property
    def count_key(self) -> str:
        return ".".join(map(str, ("rollout", *self.counted_at)))


def find_answer_level(kinds: Sequence[str]) -> int:
    """Number, from 0, of the level of kind `answer`, or else of the first."""
    return kinds.index(ANSWER) if ANSWER in kinds else 0


class WorkedExample(StrictModel):
    """A worked example, shown as two messages before every problem."""

    user: Annotated[str, Field(min_length=1)]
    assistant: Annotated[str, Field(min_length=1)]

    @property
    def messages(self) -> tuple[Message, Message]:
        return Message("user", self.user), Message("assistant", self.assistant)


class DynamicSampling(StrictModel):
    """Replaces trees in which no group's scores differ by newly sampled ones (DAPO)."""

    max_batches: Count = Field(4, ge=1)
    """Maximum draws of `prompts_per_step` per step; after that, the step trains on what it has."""


class PromptLimit(StrictModel):
    """Leaves out problems whose prompt is too long: the next one takes its place in training, and
    none in an evaluation. `prompts/dropped` counts them in every step."""

    limit: Count | None = Field(None, ge=1)
    """Longest prompt in tokens, template and system message included; null leaves only the model's
    context, which must always have room for the token limits of the turns too."""


class Schedule(StrictModel, Plugin):
    """The `rollout:` section of one schedule, selected by the field `schedule`.

    A subclass declares `schedule: Literal["NAME"] = "NAME"`, with the name of its entry point, and
    for every kind of turn a `TurnSpec` and a number of samples. rlx samples the trees level by
    level: `counts[kind]` turns below every turn of the kind before. One whose kinds are not the
    same in every experiment overrides `list_levels`, `copy_with_levels` and `read_turns` instead.

    Attributes:
        counts: for every kind of turn with a prompt, in order, the key with the number of samples
            below each turn of the kind before; the kind is the key of its `TurnSpec`.
        implementation: "module:function" that samples the trees instead; "" if there is none.
            Called as `f(settings, problems, seeds, session, dialogue)` with the arguments of
            `rlx.rollout.sample_rollout_trees`; returns one `rlx.rollout.RolloutTree` per problem,
            with turns of these kinds and no more than these numbers. `settings` is this object,
            in an evaluation with another number and another sampling of first turns. A step may
            call it several times, each with some of its problems.
    """

    counts: ClassVar[Mapping[str, str]] = {}
    implementation: ClassVar[str] = ""

    system: str = ""
    """System message of every dialogue whose problem has none; models without a chat template see
    it before the prompt."""
    examples: tuple[WorkedExample, ...] = ()
    """Worked examples as messages of the dialogue, after the system message."""
    prompts_per_step: Count = Field(32, ge=1)
    max_prompt_tokens: PromptLimit | None = None
    """null shows every problem as it is; one that does not fit into the context ends the run."""
    dynamic_sampling: DynamicSampling | None = None
    """null trains on every sampled tree."""
    schedule: str

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        named = [*cls.counts, *cls.counts.values()]
        if unknown := [key for key in named if key not in cls.model_fields]:
            raise TypeError(f"{cls.__name__}.counts names {unknown[0]!r}, which is no field of it")

    @classmethod
    def read_turns(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of each kind of turn in a section that is not validated yet."""
        return {kind: section.get(kind) for kind in cls.counts}

    def list_levels(self) -> tuple[TurnLevel, ...]:
        return tuple(
            TurnLevel(kind, getattr(self, key), getattr(self, kind), (kind,), (key,))
            for kind, key in self.counts.items()
        )

    def copy_with_levels(self, levels: Sequence[TurnLevel]) -> Self:
        """Returns a copy whose levels have other counts and settings."""
        counts = {self.counts[level.kind]: level.count for level in levels}
        return self.model_copy(update={**counts, **{v.kind: v.turn for v in levels}})

    def arrange_demonstration(self, turns: Sequence[str]) -> tuple[str, ...]:
        """The texts of a demonstration's turns, as this schedule has its turns."""
        return tuple(turns)

    @property
    def turns(self) -> tuple[str, ...]:
        """Kinds of turn with a prompt, in order."""
        return tuple(level.kind for level in self.list_levels())

    @property
    def turn_specs(self) -> dict[str, TurnSpec]:
        return {level.kind: level.turn for level in self.list_levels()}

    @property
    def answer_turn(self) -> str:
        """The kind of turn that answers the problem: `answer`, or else the first."""
        return self.turns[find_answer_level(self.turns)]

    @property
    def budgets(self) -> dict[str, int]:
        """Maximum tokens that the policy generates in a row, by kind of turn."""
        return {turn: spec.max_new_tokens for turn, spec in self.turn_specs.items()}

    @property
    def rows_per_step(self) -> int:
        """Maximum number of rows in a step's trees."""
        counts = [level.count for level in self.list_levels()]
        rows: int = sum(accumulate(counts, mul))
        return self.prompts_per_step * rows
