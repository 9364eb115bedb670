"""The `rollout:` section (entry-point group `rlx.schedules`): the turns of rollout trees."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from rlx.plugin import (
    CurriculumRule,
    DynamicSampling,
    PluginSection,
    PromptLimit,
    Schedule,
    TurnSpec,
)
from rlx.spec.base import Count, StrictModel
from rlx.spec.reward import PluginUse

__all__ = [
    "SCHEDULES",
    "CurriculumRule",
    "DynamicSampling",
    "EnvironmentRolloutSpec",
    "EnvironmentUse",
    "ForcedAnswer",
    "PromptLimit",
    "RolloutSpec",
    "SingleRolloutSpec",
    "TurnSpec",
    "TwoTurnRolloutSpec",
]


class SingleRolloutSpec(Schedule):
    """A prompt, then answers."""

    counts: ClassVar[Mapping[str, str]] = {"answer": "num_generations_answer"}

    schedule: Literal["single"] = "single"
    num_generations_answer: Count = Field(8, ge=1)
    """G_a: answers per prompt."""
    answer: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))


class TwoTurnRolloutSpec(Schedule):
    """A prompt, answers, and for each answer a question with several confidences."""

    counts: ClassVar[Mapping[str, str]] = {
        "answer": "num_generations_answer",
        "confidence": "num_generations_confidence",
    }

    schedule: Literal["two_turn"] = "two_turn"
    num_generations_answer: Count = Field(8, ge=1)
    """G_a: answers per prompt."""
    answer: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))
    num_generations_confidence: Count = Field(4, ge=1)
    """G_c: confidences per answer."""
    confidence: TurnSpec


class EnvironmentUse(PluginUse):
    """An environment plugin by name; every other key is an option of the plugin."""

    deadline: float = Field(5.0, gt=0)
    """Time limit of one call, in seconds."""
    on_error: Literal["fail", "drop_sample", "drop_group"] = "fail"
    """What to do with a rollout whose environment raised, hung, crashed or returned an invalid
    step."""


class ForcedAnswer(StrictModel):
    """One extra turn for rollouts that are not done after the last regular turn."""

    template: str = ""
    """Text after the last observation that asks the policy for its answer."""
    max_new_tokens: Count | None = Field(None, ge=1)
    """null uses the limit of the other turns."""


class EnvironmentRolloutSpec(Schedule):
    """A prompt, then multi-turn rollouts in which an environment responds to every turn."""

    counts: ClassVar[Mapping[str, str]] = {"turn": "num_generations"}

    schedule: Literal["environment"] = "environment"
    environment: EnvironmentUse
    num_generations: Count = Field(8, ge=1)
    """G: rollouts per prompt."""
    max_turns: Count = Field(6, ge=1)
    """Maximum number of regular turns; a rollout that is done earlier ends earlier."""
    turn: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))
    """Sampling of every turn; the template is shown before the first."""
    forced_answer: ForcedAnswer | None = None
    """null ends a rollout after `max_turns`, done or not."""
    observation: Literal["message", "inline"] = "message"
    """How observations are shown to the policy: message, as a user message in the model's dialogue
    format; inline, as tokens directly after the turn (KG-R1)."""

    @property
    def has_one_turn(self) -> bool:
        """Whether the policy never sees an observation, so that a demonstration is its one turn."""
        return self.max_turns == 1 and self.forced_answer is None

    @property
    def budgets(self) -> dict[str, int]:
        """Maximum tokens that the policy generates in a row, over all of its turns."""
        forced = self.forced_answer
        last = 0 if forced is None else forced.max_new_tokens or self.turn.max_new_tokens
        return {"turn": self.max_turns * self.turn.max_new_tokens + last}


SCHEDULES: Final = PluginSection(
    base=Schedule,
    group="rlx.schedules",
    kind="schedule",
    key="schedule",
    shipped={
        "single": SingleRolloutSpec,
        "two_turn": TwoTurnRolloutSpec,
        "environment": EnvironmentRolloutSpec,
    },
)

RolloutSpec = Annotated[Schedule, SCHEDULES]
