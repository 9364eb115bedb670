"""What an experiment may say about the loss: independent choices, and a bonus."""

from typing import Annotated, Literal

from pydantic import Field

from rlx.spec.base import StrictModel
from rlx.spec.credit import KlKind

__all__ = [
    "Aggregate",
    "Correction",
    "EntropyBonus",
    "KlPenalty",
    "LossSpec",
    "MaskedCorrection",
    "Ratio",
    "Surrogate",
    "TruncatedCorrection",
]

Ratio = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo", "none"]
Aggregate = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


class EntropyBonus(StrictModel):
    """Reward for keeping a distribution open, on the tokens inside one named span or on all."""

    coefficient: float = Field(gt=0)
    """Times the mean entropy in nats of the span's content tokens."""
    span: str | None = None
    """Delimiters are left out: only what stands between the tags is meant to vary. null is every
    token that learns."""


class KlPenalty(StrictModel):
    """Distance from the reference policy as a term of the loss, not of the reward."""

    coefficient: float = Field(gt=0)
    kl_penalty: KlKind = "k2"
    """k2 has the gradient of the KL; k1's is zero in expectation, k3's that of the reverse KL."""


class _Correction(StrictModel):
    level: Literal["token", "sequence"] = "token"
    """token: each is weighed by its own ratio. sequence: all of a row by the product of theirs."""
    cap: float = Field(2.0, ge=1)
    """The largest ratio that counts as it is."""


class TruncatedCorrection(_Correction):
    """Truncated importance sampling: a larger ratio counts as `cap`."""

    kind: Literal["truncate"] = "truncate"


class MaskedCorrection(_Correction):
    """Masked importance sampling: what leaves [low, cap] does not count at all."""

    kind: Literal["mask"] = "mask"
    low: float = Field(0.0, ge=0, le=1)
    """The smallest ratio that counts; 0 keeps every small one. IcePop: 0.5, with `cap: 5`."""


Correction = Annotated[TruncatedCorrection | MaskedCorrection, Field(discriminator="kind")]


class LossSpec(StrictModel):
    """Ratio, surrogate, penalty and aggregation; none knows of the others."""

    ratio: Ratio = "token"
    """sequence: the geometric mean over the row's learning tokens (GSPO)."""
    surrogate: Surrogate = "clip"
    """clip: PPO's. cispo: the clipped ratio is a weight without gradient. none: never clipped."""
    clip: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0)]] = (0.2, 0.2)
    """(low, high): the ratio is clipped to [1 - low, 1 + high]."""
    dual_clip: float | None = Field(3.0, gt=1)
    """With a negative advantage PPO's loss is at most this multiple of it; null switches it off."""
    kl: KlPenalty | None = None
    aggregate: Aggregate = "token_mean"
    """token_mean: every learning token counts alike (BNPO). sequence_mean: every row counts alike
    (GRPO). sequence_sum: a row counts as its number of tokens, rows are averaged. constant: as
    that, over `constant_length` (Dr. GRPO)."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens that `aggregate: constant` divides by; null is the turn's max_new_tokens."""
    per_turn: bool = False
    """Average within each kind of turn, then add: short confidences are not drowned by answers."""
    entropy: EntropyBonus | None = None
    old_logprobs: Literal["behaviour", "learner"] = "behaviour"
    """The ratio's denominator: as the sampler reported them, or recomputed by the learner."""
    correction: Correction | None = None
    """Weighs every token by learner over sampler, before the update; needs `old_logprobs:
    learner`, since otherwise the loss's own ratio is that."""
