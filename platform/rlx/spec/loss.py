"""The `loss:` section: ratio, surrogate, KL penalty, aggregation and entropy bonus."""

from typing import Annotated, Literal

from pydantic import Field

from rlx.plugin import Count, StrictModel
from rlx.spec.estimator import KlKind

Ratio = Literal["token", "sequence", "sequence_token"]
Surrogate = Literal["clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "log_clip", "none"]
Divergence = Literal["tv", "kl"]
Aggregate = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
ProperScore = Literal["brier", "log", "spherical"]


class EntropyBonus(StrictModel):
    """Entropy bonus on the tokens inside one named span, or on all learning tokens."""

    coefficient: float = Field(gt=0)
    """Multiplies the mean entropy, in nats, of the span's content tokens."""
    span: str | None = None
    """Name of the span; its delimiters are excluded, since only the content should vary. null
    means every learning token."""
    schedule: Literal["constant", "learning_rate"] = "constant"
    """learning_rate: the coefficient falls with the learning rate, in proportion to it."""


class ExpectedScore(StrictModel):
    """Expected proper score of a stated confidence in closed form, in place of a sampled score.

    The loss gains -coefficient · Σᵥ π(v) · score(v, y) over the task's confidence values v, with
    the weight of the span's first token. The span's own tokens then get no sampled credit; all
    other tokens keep theirs.
    """

    span: str = "confidence"
    """Name of the span whose content is a confidence."""
    of: str = "accuracy"
    """Turn reward that is the label y, in [0, 1], of the span's turn or of an earlier one."""
    over: Literal["path", "prompt"] = "path"
    """path: the label of the span's turn, or of the nearest earlier one that has it. prompt: the
    mean label of all turns of the prompt that have one."""
    score: ProperScore = "brier"
    """Each is at most 1, and 0 at worst, as mass outside the task's values is. brier:
    1 - (y - v)². log: 1 - ln p / ln .001 with p, the probability given to y, at least .001.
    spherical: p / √(v² + (1 - v)²)."""
    coefficient: float = Field(1.0, gt=0)
    """Multiplies the term. At `lambda_conf` of the estimator two_level, times the weight of the
    sampled reward, it is the expectation of what sampling would give."""


class KlPenalty(StrictModel):
    """KL penalty against the reference policy as a term of the loss, not of the reward."""

    coefficient: float = Field(gt=0)
    kl_penalty: KlKind = "k2"
    """KL estimator. k2 has the gradient of the KL; that of k1 is zero in expectation, that of k3 is
    the gradient of the reverse KL."""


class _Correction(StrictModel):
    level: Literal["token", "sequence"] = "token"
    """token: weight each token by its own ratio. sequence: weight all tokens of a row by the
    product of their ratios."""
    cap: float = Field(2.0, ge=1)
    """Upper bound on the ratio."""


class TruncatedCorrection(_Correction):
    """Truncated importance sampling: ratios above `cap` are clamped to it."""

    kind: Literal["truncate"] = "truncate"


class MaskedCorrection(_Correction):
    """Masked importance sampling: ratios outside [low, cap] get weight 0."""

    kind: Literal["mask"] = "mask"
    low: float = Field(0.0, ge=0, le=1)
    """Lower bound on the ratio; 0 disables it. IcePop: 0.5, with `cap: 5`."""


Correction = Annotated[TruncatedCorrection | MaskedCorrection, Field(discriminator="kind")]


class _Covariance(StrictModel):
    fraction: float = Field(2e-4, gt=0, le=1)
    """Share of the step's learning tokens to which it applies; at least one token."""


class ClipCovariance(_Covariance):
    """Clip-Cov: tokens drawn from those with a high covariance get no gradient.

    A token's covariance is (A - mean) · (log π - mean), means over the step's learning tokens.
    """

    kind: Literal["clip"] = "clip"
    low: float = 1.0
    """Only tokens with a larger covariance are drawn."""
    high: float = 5.0
    """Only tokens with a smaller covariance are drawn."""


class KlCovariance(_Covariance):
    """KL-Cov: the tokens with the highest covariance are held near the old policy."""

    kind: Literal["kl"] = "kl"
    coefficient: float = Field(1.0, gt=0)
    """Multiplies |log r| of these tokens."""


Covariance = Annotated[ClipCovariance | KlCovariance, Field(discriminator="kind")]


class LossSpec(StrictModel):
    """Ratio, surrogate, KL penalty and aggregation, each chosen independently."""

    ratio: Ratio = "token"
    """token: a ratio per token. sequence: the geometric mean over the row's learning tokens
    (GSPO). sequence_token: the same value, with the gradient of the token's own ratio
    (GSPO-token)."""
    surrogate: Surrogate = "clip"
    """clip: PPO. cispo: the clipped ratio is a weight without gradient. sapo: a soft gate. dppo_tv,
    dppo_kl: tokens whose probability has moved too far get no gradient. log_clip: log-ratios of
    tokens are clipped before `ratio` averages them (GMPO). none: no clipping."""
    clip: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0)]] = (0.2, 0.2)
    """(low, high): the ratio is clipped to [1 - low, 1 + high]. dppo_tv, dppo_kl: largest
    divergence of a token's probability. log_clip: the log-ratio is clipped to [-low, high]."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Dual clip: with a negative advantage A, PPO's loss is at most this value times |A|; null
    disables it."""
    temperatures: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (1.0, 1.05)
    """sapo: (positive, negative), how fast a token fades as its ratio leaves 1, by the sign of its
    advantage."""
    ratio_cap: float = Field(20.0, ge=1)
    """dppo_tv, dppo_kl: largest ratio that weighs a token."""
    sequence_mask: float | None = Field(None, ge=0)
    """Off-policy sequence mask: tokens with a negative advantage get no gradient in rows whose mean
    of -log r exceeds this, in nats per token."""
    covariance: Covariance | None = None
    kl: KlPenalty | None = None
    aggregate: Aggregate = "token_mean"
    """token_mean: every learning token has the same weight (BNPO). sequence_mean: every row has
    the same weight (GRPO). sequence_sum: token losses are summed per row, then averaged over rows.
    constant: as sequence_sum, divided by `constant_length` (Dr. GRPO)."""
    constant_length: Count | None = Field(None, ge=1)
    """Divisor of `aggregate: constant`, in tokens; null uses the turn's max_new_tokens."""
    per_turn: bool = False
    """Aggregate within each kind of turn, then add, so that long answers do not outweigh short
    confidences."""
    entropy: EntropyBonus | None = None
    expected: ExpectedScore | None = None
    old_logprobs: Literal["behaviour", "learner"] = "behaviour"
    """Denominator of the ratio: log-probabilities reported by the sampler (behaviour), or
    recomputed by the learner."""
    correction: Correction | None = None
    """Importance weights p_learner / p_sampler on every token, from before the update; requires
    `old_logprobs: learner`, since otherwise the loss's own ratio already is p_learner /
    p_sampler."""
