"""What an experiment may say about sampling: the shape of the rollout trees."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlx.spec.base import Strict

__all__ = ["DynamicSampling", "RolloutSpec", "Single", "TurnSpec", "TwoTurn"]


class TurnSpec(Strict):
    """How one kind of turn is asked for and sampled."""

    template: str = "{prompt}"
    """Text shown before the turn; `{prompt}` stands for the problem's prompt."""
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 keeps every token."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The turn ends with the first of these; the text of the stop belongs to the turn."""
    spans: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")], ...] = ()
    """Names of the tags whose contents and delimiters are recorded: `<name>...</name>`."""


class DynamicSampling(Strict):
    """Trees in which no group's scores differ are replaced by newly drawn ones (DAPO)."""

    max_batches: int = Field(4, ge=1)
    """At most so many draws of `prompts_per_step` for one step; then it trains on what it has."""


class _Answer(Strict):
    system: str = ""
    """System message of every dialogue whose problem brings none; plain models see it first."""
    prompts_per_step: int = Field(32, ge=1)
    num_generations_answer: int = Field(8, ge=1)
    """G_a: answers per prompt."""
    answer: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))
    dynamic_sampling: DynamicSampling | None = None
    """null trains on whatever was drawn."""


class Single(_Answer):
    """Prompt, then answers."""

    turns: ClassVar[tuple[str, ...]] = ("answer",)
    schedule: Literal["single"] = "single"


class TwoTurn(_Answer):
    """Prompt, answers, and below each answer a question with several confidences."""

    turns: ClassVar[tuple[str, ...]] = ("answer", "confidence")
    schedule: Literal["two_turn"] = "two_turn"
    num_generations_confidence: int = Field(4, ge=1)
    """G_c: confidences per answer."""
    confidence: TurnSpec


RolloutSpec = Annotated[Single | TwoTurn, Field(discriminator="schedule")]
