"""What an experiment may say about the loss."""

from typing import Annotated, Literal

from pydantic import Field

from rlx.spec.base import Strict

__all__ = ["EntropyBonus", "LossSpec"]


class EntropyBonus(Strict):
    """Reward for keeping a distribution open, on the tokens inside one named span."""

    coefficient: float = Field(gt=0)
    """Times the mean entropy in nats of the span's content tokens."""
    span: str
    """Delimiters are left out: only what stands between the tags is meant to vary."""


class LossSpec(Strict):
    """Clipped surrogate and its aggregation."""

    clip: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0)]] = (0.2, 0.2)
    """(low, high): the ratio is clipped to [1 - low, 1 + high]."""
    dual_clip: float | None = Field(3.0, gt=1)
    """With a negative advantage the loss is at most this multiple of it; null switches it off."""
    aggregate: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: every learning token counts alike. sequence_mean: every row counts alike."""
    per_turn: bool = False
    """Average within each kind of turn, then add: short confidences are not drowned by answers."""
    entropy: EntropyBonus | None = None
    old_logprobs: Literal["behaviour", "learner"] = "behaviour"
    """The ratio's denominator: as the sampler reported them, or recomputed by the learner."""
