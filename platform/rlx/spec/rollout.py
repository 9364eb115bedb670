"""What an experiment may say about sampling: the shape of the rollout trees."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlx.spec.base import StrictModel
from rlx.spec.reward import PluginUse

__all__ = [
    "DynamicSampling",
    "EnvironmentRolloutSpec",
    "EnvironmentUse",
    "ForcedAnswer",
    "RolloutSpec",
    "SingleRolloutSpec",
    "TurnSpec",
    "TwoTurnRolloutSpec",
]


class TurnSpec(StrictModel):
    """How one kind of turn is asked for and sampled."""

    template: str = "{prompt}"
    """Text shown before the turn; `{prompt}` stands for the problem's prompt. Empty after another
    turn: this one goes on where that one stopped, in the same message."""
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 keeps every token."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The turn ends with the first of these; the text of the stop belongs to the turn."""
    spans: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")], ...] = ()
    """Names of the tags whose contents and delimiters are recorded: `<name>...</name>`."""


class DynamicSampling(StrictModel):
    """Trees in which no group's scores differ are replaced by newly drawn ones (DAPO)."""

    max_batches: int = Field(4, ge=1)
    """At most so many draws of `prompts_per_step` for one step; then it trains on what it has."""


class _RolloutSpecBase(StrictModel):
    counts: ClassVar[Mapping[str, str]] = {}
    """For every kind of turn that is asked for, the key that says how many are sampled."""

    system: str = ""
    """System message of every dialogue whose problem brings none; plain models see it first."""
    prompts_per_step: int = Field(32, ge=1)
    dynamic_sampling: DynamicSampling | None = None
    """null trains on whatever was drawn."""
    off_policy_steps: Literal[0, 1] = 0
    """1: a step's rollouts are sampled while the step before learns, with the weights from before
    its update. The two overlap, and all steps of a phase but the first learn from older samples."""

    @property
    def turns(self) -> tuple[str, ...]:
        """Kinds of turn that are asked for, in order; each is the key of a `TurnSpec`."""
        return tuple(self.counts)

    @property
    def turn_specs(self) -> dict[str, TurnSpec]:
        """How each kind of turn is asked for."""
        return {turn: getattr(self, turn) for turn in self.turns}

    @property
    def budgets(self) -> dict[str, int]:
        """Tokens that the policy may write in a row, by the kind of turn that it is asked for."""
        return {turn: spec.max_new_tokens for turn, spec in self.turn_specs.items()}

    @property
    def rows_per_step(self) -> int:
        """Rows that a step's trees have at most."""
        rows, width = 0, self.prompts_per_step
        for key in self.counts.values():
            width *= getattr(self, key)
            rows += width
        return rows


class SingleRolloutSpec(_RolloutSpecBase):
    """Prompt, then answers."""

    counts: ClassVar[Mapping[str, str]] = {"answer": "num_generations_answer"}

    schedule: Literal["single"] = "single"
    num_generations_answer: int = Field(8, ge=1)
    """G_a: answers per prompt."""
    answer: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))


class TwoTurnRolloutSpec(_RolloutSpecBase):
    """Prompt, answers, and below each answer a question with several confidences."""

    counts: ClassVar[Mapping[str, str]] = {
        "answer": "num_generations_answer",
        "confidence": "num_generations_confidence",
    }

    schedule: Literal["two_turn"] = "two_turn"
    num_generations_answer: int = Field(8, ge=1)
    """G_a: answers per prompt."""
    answer: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))
    num_generations_confidence: int = Field(4, ge=1)
    """G_c: confidences per answer."""
    confidence: TurnSpec


class EnvironmentUse(PluginUse):
    """An environment by name, with its own options beside it."""

    deadline: float = Field(5.0, gt=0)
    """Seconds that one call may take."""
    on_error: Literal["fail", "drop_sample", "drop_group"] = "fail"
    """What becomes of a rollout whose environment raised, hung, crashed or answered nonsense."""


class ForcedAnswer(StrictModel):
    """One more turn for rollouts that are not done after the last regular one."""

    template: str = ""
    """Text behind the last observation, by which the policy is told to answer."""
    max_new_tokens: int | None = Field(None, ge=1)
    """null is that of the other turns."""


class EnvironmentRolloutSpec(_RolloutSpecBase):
    """Prompt, then rollouts of many turns, each answered by an environment."""

    counts: ClassVar[Mapping[str, str]] = {"turn": "num_generations"}

    schedule: Literal["environment"] = "environment"
    environment: EnvironmentUse
    num_generations: int = Field(8, ge=1)
    """G: rollouts per prompt."""
    max_turns: int = Field(6, ge=1)
    """Regular turns; a rollout that is done earlier ends there."""
    turn: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))
    """How every turn is sampled; its template is shown before the first."""
    forced_answer: ForcedAnswer | None = None
    """null ends a rollout after `max_turns`, done or not."""
    observation: Literal["message", "inline"] = "message"
    """How the policy is shown what the environment says: as the other side's message in the
    model's own form of dialogue, or inline, as tokens right behind the turn (the source's way)."""

    @property
    def budgets(self) -> dict[str, int]:
        """Tokens that the policy may write in a row, all of its turns together."""
        forced = self.forced_answer
        last = 0 if forced is None else forced.max_new_tokens or self.turn.max_new_tokens
        return {"turn": self.max_turns * self.turn.max_new_tokens + last}


RolloutSpec = Annotated[
    SingleRolloutSpec | TwoTurnRolloutSpec | EnvironmentRolloutSpec, Field(discriminator="schedule")
]
