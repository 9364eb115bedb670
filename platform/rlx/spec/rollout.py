"""The `rollout:` section: how turns are sampled, and the shape of the rollout trees."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlx.spec.base import Count, StrictModel
from rlx.spec.reward import PluginUse

__all__ = [
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


class TurnSpec(StrictModel):
    """Prompt template and sampling parameters of one kind of turn."""

    template: str = "{prompt}"
    """Text shown before the turn; `{prompt}` is replaced by the problem's prompt. If it is empty
    for a turn after the first, the turn continues the previous one in the same message."""
    max_new_tokens: Count = Field(256, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Count = Field(0, ge=0)
    """0 disables top-k."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop strings: the turn ends with the first one, which is included in the turn's text."""
    spans: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")], ...] = ()
    """Names of tags, `<name>...</name>`, whose contents and delimiters are recorded."""


class DynamicSampling(StrictModel):
    """Replaces trees in which no group's scores differ by newly sampled ones (DAPO)."""

    max_batches: Count = Field(4, ge=1)
    """Maximum draws of `prompts_per_step` per step; after that, the step trains on what it has."""


class PromptLimit(StrictModel):
    """What happens to problems whose prompt is too long. `prompts/dropped` and `prompts/truncated`
    count them in every step."""

    limit: Count | None = Field(None, ge=1)
    """Longest prompt in tokens, template and system message included; null leaves only the model's
    context, which must always have room for the token limits of the turns too."""
    on_longer: Literal["drop", "truncate", "error"] = "drop"
    """drop: the next problem takes its place in training, and none in an evaluation. truncate: the
    beginning of the problem's text is removed. error: the run ends."""


class _RolloutSpecBase(StrictModel):
    counts: ClassVar[Mapping[str, str]] = {}
    """For every kind of turn with a prompt, the key with the number of samples."""

    system: str = ""
    """System message of every dialogue whose problem has none; models without a chat template see
    it before the prompt."""
    prompts_per_step: Count = Field(32, ge=1)
    max_prompt_tokens: PromptLimit | None = None
    """null shows every problem as it is; one that does not fit into the context ends the run."""
    dynamic_sampling: DynamicSampling | None = None
    """null trains on every sampled tree."""
    off_policy_steps: Literal[0, 1] = 0
    """1: sample a step's rollouts during the previous step's update, with the weights from before
    that update. Every step of a phase except the first then trains on samples of older weights."""

    @property
    def turns(self) -> tuple[str, ...]:
        """Kinds of turn with a prompt, in order; each is the key of a `TurnSpec`."""
        return tuple(self.counts)

    @property
    def turn_specs(self) -> dict[str, TurnSpec]:
        """The `TurnSpec` of each kind of turn."""
        return {turn: getattr(self, turn) for turn in self.turns}

    @property
    def budgets(self) -> dict[str, int]:
        """Maximum tokens that the policy generates in a row, by kind of turn."""
        return {turn: spec.max_new_tokens for turn, spec in self.turn_specs.items()}

    @property
    def rows_per_step(self) -> int:
        """Maximum number of rows in a step's trees."""
        rows, width = 0, self.prompts_per_step
        for key in self.counts.values():
            width *= getattr(self, key)
            rows += width
        return rows


class SingleRolloutSpec(_RolloutSpecBase):
    """A prompt, then answers."""

    counts: ClassVar[Mapping[str, str]] = {"answer": "num_generations_answer"}

    schedule: Literal["single"] = "single"
    num_generations_answer: Count = Field(8, ge=1)
    """G_a: answers per prompt."""
    answer: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))


class TwoTurnRolloutSpec(_RolloutSpecBase):
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


class EnvironmentRolloutSpec(_RolloutSpecBase):
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
    def budgets(self) -> dict[str, int]:
        """Maximum tokens that the policy generates in a row, over all of its turns."""
        forced = self.forced_answer
        last = 0 if forced is None else forced.max_new_tokens or self.turn.max_new_tokens
        return {"turn": self.max_turns * self.turn.max_new_tokens + last}


RolloutSpec = Annotated[
    SingleRolloutSpec | TwoTurnRolloutSpec | EnvironmentRolloutSpec, Field(discriminator="schedule")
]
