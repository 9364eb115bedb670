"""The loss, from independent choices: ratio, surrogate and aggregation, plus an entropy bonus.

Aggregation is a weight per token, computed once for the whole optimiser step: the loss is Σ weight
· token loss over every micro-batch and rank. The gradient is therefore the same however the batch
is split, and denominators are always global.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.ordered_sums import sum_by_slot
from rlx.spec import (
    Aggregate,
    ClipCovariance,
    Correction,
    Divergence,
    KlCovariance,
    LossSpec,
    ProperScore,
)

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 nats before exponentiation: beyond that, a clipped token's gradient
would be 0 · ∞.
"""
TINY = 1e-8
"""Added to probabilities of everything but the token, which can be 0."""


# Ratio ------------------------------------------------------------------------------------------
def sequence_log_ratio(log_ratio: Tensor, rows: Tensor) -> Tensor:
    """Each token's log-ratio replaced by the mean over its row: one ratio per sequence.

        log sᵢ = 1/|yᵢ| Σₜ log rᵢₜ

    `[M]` nats of all learning tokens of every row present, and the row of each.

    Reference:
        GSPO, arXiv 2507.18071, equation 7.
    """
    _, slot, counts = rows.unique(return_inverse=True, return_counts=True)
    means: Tensor = sum_by_slot(log_ratio, slot, len(counts)) / counts
    return means[slot]


def _compute_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


# Surrogate --------------------------------------------------------------------------------------
def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip: tuple[float, float],
    dual_clip: float | None,
) -> Tensor:
    """PPO token losses, `[...]` of `[...]` log-ratios in nats, with separate clip bounds (low,
    high), and a dual clip for negative advantages.

        ℓₜ = -min(rₜ Aₜ, clip(rₜ, 1 - low, 1 + high) Aₜ)
        Aₜ < 0:  ℓₜ = min(ℓₜ, -c Aₜ)        c = dual_clip > 1

    Reference:
        PPO, arXiv 1707.06347, equation 7; dual clip, arXiv 1912.09729; clip-higher, arXiv
        2503.14476.
    """
    ratio = _compute_ratio(log_ratio)
    low, high = clip
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def compute_cispo_loss(
    log_ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, clip: tuple[float, float]
) -> Tensor:
    """Token losses with the clipped ratio as a weight, so that every token keeps its gradient.

        ℓₜ = -sg(clip(rₜ, 1 - low, 1 + high)) Aₜ log πₜ

    Reference:
        CISPO, arXiv 2506.13585, equation 4.
    """
    low, high = clip
    weight = _compute_ratio(log_ratio.detach()).clamp(1 - low, 1 + high)
    return -weight * advantages * logprobs


def compute_unclipped_loss(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Token losses of the importance-weighted policy gradient, `[...]`.

    ℓₜ = -rₜ Aₜ
    """
    return -_compute_ratio(log_ratio) * advantages


def compute_sapo_loss(
    log_ratio: Tensor, advantages: Tensor, *, temperatures: tuple[float, float]
) -> Tensor:
    """Token losses with a soft gate in place of the clip.

        ℓₜ = -4/τ · sigmoid(τ · (rₜ - 1)) · Aₜ        τ = positive if Aₜ > 0, else negative

    Its gradient is that of `compute_unclipped_loss` at rₜ = 1, and fades on both sides.

    A larger temperature, (positive, negative), fades faster.

    Reference:
        SAPO, arXiv 2511.20347.
    """
    positive, negative = (advantages.new_tensor(value) for value in temperatures)
    tau = torch.where(advantages > 0, positive, negative)
    return -4 / tau * torch.sigmoid(tau * (_compute_ratio(log_ratio) - 1)) * advantages


def compute_dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Divergence,
    bounds: tuple[float, float],
    cap: float,
) -> Tensor:
    """Token losses weighted by the ratio, without the tokens that `find_near_tokens` leaves out.

        ℓₜ = -sg(min(rₜ, cap) · nearₜ) Aₜ log πₜ

    Reference:
        DPPO, arXiv 2602.04879.
    """
    near = find_near_tokens(
        logprobs, old_logprobs, advantages, divergence=divergence, bounds=bounds
    )
    weight = _compute_ratio((logprobs - old_logprobs).detach()).clamp(max=cap)
    return -torch.where(near, weight, 0.0) * advantages * logprobs


def find_near_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Divergence,
    bounds: tuple[float, float],
) -> Tensor:
    """`[...]` bool tokens that the advantage does not push further out of the trust region.

        tv:  D = |p - q|        kl:  D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
        A > 0:  D ≤ high or p ≤ q        otherwise:  D ≤ low or p ≥ q

    p and q are the token's probabilities under the policy being trained and the old one: the
    divergence between "this token" and "any other".

    Reference:
        DPPO, arXiv 2602.04879, binary approximations.
    """
    low, high = bounds
    p, q = logprobs.detach().exp(), old_logprobs.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        others = (1 - q) * ((1 - q + TINY) / (1 - p + TINY)).log()
        distance = q * (old_logprobs - logprobs.detach()) + others
    above = (distance <= high) | (p <= q)
    below = (distance <= low) | (p >= q)
    return torch.where(advantages > 0, above, below)


def clip_log_ratio(log_ratio: Tensor, advantages: Tensor, *, clip: tuple[float, float]) -> Tensor:
    """Log-ratios bounded on the side to which the advantage pushes them.

        A > 0:  min(log r, high)        A < 0:  max(log r, -low)        A = 0:  0

    Their mean over a row is the logarithm of GMPO's geometric mean.

    Reference:
        GMPO, arXiv 2507.20673.
    """
    low, high = clip
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    return torch.where(advantages == 0, 0.0, bounded)


def find_close_sequences(
    log_ratio: Tensor, advantages: Tensor, rows: Tensor, *, bound: float
) -> Tensor:
    """`[M]` bool tokens of rows near the old policy, and all tokens with advantages of 0 or more,
    of all learning tokens of every row present.

        Aᵢₜ ≥ 0 or -1/|yᵢ| Σₜ log rᵢₜ ≤ bound        in nats per token

    Reference:
        Off-policy sequence mask, DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    return (advantages >= 0) | (-sequence_log_ratio(log_ratio.detach(), rows) <= bound)


def compute_token_covariances(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """`[B, T]` each token's part of the covariance of advantage and log-probability; 0 outside the
    mask of learning tokens of the whole step.

        cₜ = (Aₜ - mean A) · (log πₜ - mean log π), means over the mask

    Reference:
        Cui et al., "The Entropy Mechanism of Reinforcement Learning", arXiv 2505.22617.
    """
    covariances = torch.zeros_like(advantages)
    if mask.any():
        a, x = advantages[mask], logprobs[mask].to(advantages)
        covariances[mask] = (a - a.mean()) * (x - x.mean())
    return covariances


def find_largest_covariances(covariances: Tensor, mask: Tensor, *, fraction: float) -> Tensor:
    """`[B, T]` bool tokens with the largest positive covariances, a `fraction` of those in the
    mask, but at least one: KL-Cov, arXiv 2505.22617."""
    chosen, inside = torch.zeros_like(mask), covariances[mask]
    count = min(_count_tokens(mask, fraction), len(inside))
    largest = torch.zeros_like(inside, dtype=torch.bool)
    largest[inside.topk(count).indices] = True
    return chosen.masked_scatter(mask, largest & (inside > 0))


def draw_covariant_tokens(
    covariances: Tensor, mask: Tensor, *, fraction: float, low: float, high: float, seed: int
) -> Tensor:
    """`[B, T]` bool tokens drawn at random from those with low < c < high, at most a `fraction` of
    those in the mask, but at least one: Clip-Cov, arXiv 2505.22617."""
    candidates = (mask & (covariances > low) & (covariances < high)).nonzero()
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    drawn = candidates[order[: _count_tokens(mask, fraction)]]
    chosen = torch.zeros_like(mask)
    chosen[drawn[:, 0], drawn[:, 1]] = True
    return chosen


def select_covariant_tokens(
    advantages: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    spec: ClipCovariance | KlCovariance,
    seed: int,
) -> Tensor:
    """`[B, T]` bool tokens to which `loss.covariance` applies, by log-probabilities of the old
    policy, so that the choice is one for the whole step, whatever its micro-batches and
    mini-batches."""
    covariances = compute_token_covariances(advantages, logprobs, mask)
    if isinstance(spec, KlCovariance):
        return find_largest_covariances(covariances, mask, fraction=spec.fraction)
    bounds = {"low": spec.low, "high": spec.high}
    return draw_covariant_tokens(covariances, mask, fraction=spec.fraction, seed=seed, **bounds)


def _count_tokens(mask: Tensor, fraction: float) -> int:
    return max(int(fraction * int(mask.sum())), 1)


class TokenLosses(NamedTuple):
    """Token losses before any penalty, `[M]`; the log-ratios in them; where they are held back."""

    losses: Tensor
    log_ratio: Tensor
    held: Tensor


def compute_token_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    rows: Tensor,
    spec: LossSpec,
    covariant: Tensor | None = None,
) -> TokenLosses:
    """The surrogate of each token, with the ratio, masks and covariance rule of `spec`.

    Args:
        logprobs: `[M]` nats under the policy being trained.
        old_logprobs: `[M]` nats, the denominator of the ratio.
        rows: `[M]` int64 row of each token; with ratios or masks of sequences, all learning tokens
            of every row are present.
        covariant: `[M]` bool tokens that `loss.covariance` has chosen; None if off.
    """
    token_log_ratio = log_ratio = logprobs - old_logprobs
    held = torch.zeros_like(rows, dtype=torch.bool)
    if spec.surrogate == "log_clip":
        log_ratio = clip_log_ratio(token_log_ratio, advantages, clip=spec.clip)
        held = (log_ratio != token_log_ratio) & (advantages != 0)
    match spec.ratio:
        case "sequence":
            log_ratio = sequence_log_ratio(log_ratio, rows)
        case "sequence_token":
            whole = sequence_log_ratio(log_ratio.detach(), rows)
            log_ratio = whole + log_ratio - log_ratio.detach()
    low, high = spec.clip
    ratio = _compute_ratio(log_ratio.detach())
    above, below = ratio > 1 + high, ratio < 1 - low
    match spec.surrogate:
        case "clip":
            bound = spec.dual_clip
            losses = clipped_surrogate(log_ratio, advantages, clip=spec.clip, dual_clip=bound)
            held = (above & (advantages > 0)) | (below & (advantages < 0))
            if bound is not None:
                held |= (ratio > bound) & (advantages < 0)
        case "cispo":
            losses = compute_cispo_loss(log_ratio, advantages, logprobs, clip=spec.clip)
            held = (above | below) & (advantages != 0)
        case "sapo":
            losses = compute_sapo_loss(log_ratio, advantages, temperatures=spec.temperatures)
        case "dppo_tv" | "dppo_kl":
            tokens = logprobs, old_logprobs, advantages
            divergence: Divergence = "tv" if spec.surrogate == "dppo_tv" else "kl"
            losses = compute_dppo_loss(
                *tokens, divergence=divergence, bounds=spec.clip, cap=spec.ratio_cap
            )
            held = ~find_near_tokens(*tokens, divergence=divergence, bounds=spec.clip)
        case "log_clip" | "none":
            losses = compute_unclipped_loss(log_ratio, advantages)
    if spec.sequence_mask is not None:
        close = find_close_sequences(token_log_ratio, advantages, rows, bound=spec.sequence_mask)
        losses, held = torch.where(close, losses, 0.0), held | ~close
    if covariant is None:
        return TokenLosses(losses, log_ratio, held)
    if isinstance(spec.covariance, KlCovariance):
        penalty = spec.covariance.coefficient * token_log_ratio.abs()
        return TokenLosses(losses + torch.where(covariant, penalty, 0.0), log_ratio, held)
    return TokenLosses(torch.where(covariant, 0.0, losses), log_ratio, held | covariant)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Divergence between two policies on the tokens that one of them sampled.

    Attributes:
        k3: mean of r - 1 - log r with r = π/μ, nats: an estimate of KL(μ‖π) that is never negative.
        ratio_max: the largest r of any token.
        row_ratio_max: the largest product of r over a row.
    """

    k3: float
    ratio_max: float
    row_ratio_max: float


@dataclass(frozen=True, eq=False, slots=True)
class CorrectionWeights:
    """Correction weights of a step's tokens, `[B, T]`, 1 for tokens that μ did not sample; their
    mean over tokens or rows, depending on `level`, and the share that was truncated or masked."""

    weights: Tensor
    mean: float
    share: float


def compute_sampler_mismatch(learner: Tensor, sampler: Tensor, mask: Tensor) -> Mismatch | None:
    """Compares `[B, T]` log-probabilities of the same tokens under π and μ, in the mask of learning
    tokens that μ sampled; None if there is none.

    Reference:
        Schulman, "Approximating KL Divergence", 2020.
    """
    if not mask.any():
        return None
    log_ratio = _log_ratio(learner, sampler, mask)
    own = log_ratio[mask].clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    rows = log_ratio[mask.any(dim=1)].sum(dim=1).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return Mismatch(
        k3=float((own.expm1() - own).mean()),
        ratio_max=float(own.max().exp()),
        row_ratio_max=float(rows.max().exp()),
    )


def compute_correction_weights(
    learner: Tensor, sampler: Tensor, mask: Tensor, spec: Correction
) -> CorrectionWeights:
    """Importance weights for tokens that were sampled from μ instead of π.

        token:     wᵢₜ = π(aᵢₜ) / μ(aᵢₜ)
        sequence:  wᵢₜ = Πₛ π(aᵢₛ) / μ(aᵢₛ), over the row's tokens in the mask
        truncate:  min(w, cap)
        mask:      w where low ≤ w ≤ cap, else 0

    The weights carry no gradient. They are exactly 1 where the policies agree.

    Reference:
        Truncated: Ionides, "Truncated Importance Sampling", 2008; Yao et al., "Your Efficient RL
        Framework Secretly Brings You Off-Policy RL Training", 2025. Masked, and the product over
        a sequence: Liu et al., "When Speed Kills Stability", 2025. Masked tokens with both
        bounds: IcePop, Ling team, 2025.
    """
    log_ratio = _log_ratio(learner, sampler, mask)
    if spec.level == "sequence":
        counted = mask.any(dim=1, keepdim=True)
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    else:
        counted = mask
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if spec.kind == "truncate":
        changed, weights = ratio > spec.cap, ratio.clamp(max=spec.cap)
    else:
        changed = (ratio > spec.cap) | (ratio < spec.low)
        weights = ratio.masked_fill(changed, 0.0)
    count = max(int(counted.sum()), 1)
    return CorrectionWeights(
        weights=torch.where(counted, weights, weights.new_ones(())).expand_as(mask),
        mean=float(weights[counted].sum()) / count,
        share=int((changed & counted).sum()) / count,
    )


def _log_ratio(learner: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """`[B, T]` log r, 0 outside the mask."""
    return torch.where(mask, (learner - sampler).detach(), learner.new_zeros(()))


ETA = 1e-8
"""η, added to the number of tokens, so that a fully masked batch has loss 0."""


# Critic -----------------------------------------------------------------------------------------
def value_loss(
    values: Tensor, old_values: Tensor | None, returns: Tensor, *, clip: float | None
) -> Tensor:
    """`[...]` token losses of a critic, optionally clipped around its old values.

        ℓₜ = ½ max((Vₜ - Rₜ)², (clip(Vₜ, V_old - c, V_old + c) - Rₜ)²)

    Raises:
        ValueError: a clip is set without old values.

    Reference:
        Schulman et al., PPO, arXiv 1707.06347, as its authors implemented it (`ppo2`).
    """
    loss = (values - returns).square()
    if clip is not None:
        if old_values is None:
            raise ValueError("a value clip needs old_values")
        near = torch.clamp(values, old_values - clip, old_values + clip)
        loss = torch.maximum(loss, (near - returns).square())
    return loss / 2


# Aggregation ------------------------------------------------------------------------------------
def aggregation_weights(
    mask: Tensor,
    kinds: Tensor,
    *,
    aggregate: Aggregate,
    per_turn: bool,
    constant_lengths: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """`[B, T]` weights that turn token losses into the step's loss.

        token_mean:     wᵢₜ = mᵢₜ / (Σ m + η)                        BNPO, DAPO, RLCR in two turns
        sequence_mean:  wᵢₜ = mᵢₜ / (Σₜ mᵢₜ · rows)                   GRPO
        sequence_sum:   wᵢₜ = mᵢₜ / rows
        constant:       wᵢₜ = mᵢₜ / (L · rows)                       Dr. GRPO
        per_turn:       sums and counts run over rows of one kind, and the kinds are added

    Args:
        mask: `[B, T]` bool tokens that learn, of the whole optimiser step.
        kinds: `[B]` int64 rows with equal numbers are the same kind of turn.
        constant_lengths: `[B]` L of each row; for "constant" only.
        counted: `[B]` bool, the rows that are counted; by default those with a learning token.

    Reference:
        DeepSeekMath, arXiv 2402.03300, equation 3; Dr. GRPO, arXiv 2503.20783, section 3.2; DAPO,
        arXiv 2503.14476, section 3.3.
    """
    weight = mask.to(torch.float32)
    lengths = weight.sum(dim=1)
    group = kinds if per_turn else torch.zeros_like(kinds)
    _, slot = group.unique(return_inverse=True)
    zeros = weight.new_zeros(int(slot.max()) + 1)
    if aggregate == "token_mean":
        return weight / (zeros.index_add(0, slot, lengths)[slot] + ETA)[:, None]
    counted = lengths > 0 if counted is None else counted
    rows = zeros.index_add(0, slot, counted.to(torch.float32))[slot]
    if aggregate == "sequence_mean":
        rows = rows * lengths
    elif aggregate == "constant":
        if constant_lengths is None:
            raise ValueError("aggregate 'constant' needs constant_lengths")
        rows = rows * constant_lengths
    return weight / rows.clamp(min=1)[:, None]


def aggregate_losses(
    losses: Tensor,
    mask: Tensor,
    kinds: Tensor,
    *,
    aggregate: Aggregate,
    per_turn: bool = False,
    constant_lengths: Tensor | None = None,
) -> Tensor:
    """`[]` the loss of a step whose tokens are all at hand: Σ w ℓ with `aggregation_weights`; `[B,
    T]` losses are read only in the mask."""
    weights = aggregation_weights(
        mask, kinds, aggregate=aggregate, per_turn=per_turn, constant_lengths=constant_lengths
    )
    return (weights * torch.where(mask, losses, 0.0)).sum()


def entropy_weights(contents: Tensor, coefficient: float) -> Tensor:
    """`[B, T]` weights of the entropy bonus: `coefficient` times the mean over content tokens."""
    weight = contents.to(torch.float32)
    return coefficient * weight / (weight.sum() + ETA)


LEAST = 0.001
"""The log score treats probabilities below this one as equal to it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpectedScores:
    """What a step's batch says about the stated confidences of `N` of its rows.

    Attributes:
        values: the `V` texts that a confidence can be.
        rows: `[N]` int64 rows of the batch.
        starts: `[N]` int64 position of the confidence's first token in its row.
        scores: `[N, V]` score of each value under the row's label.
        tokens: `[B, T]` bool tokens of these confidences, which get no sampled credit.
    """

    values: tuple[str, ...]
    rows: Tensor
    starts: Tensor
    scores: Tensor
    tokens: Tensor
    coefficient: float


def compute_proper_scores(values: Tensor, labels: Tensor, score: ProperScore) -> Tensor:
    """`[N, V]` score of stating each value under each label.

        brier:      1 - (y - v)²
        log:        1 - ln max(p, .001) / ln .001        p = v if y = 1, 1 - v if y = 0
        spherical:  p / √(v² + (1 - v)²)

    Its expectation over labels is greatest at v = P(y = 1). All lie in [0, 1], so a response
    without any of the values, which scores 0, is never better than one of them. For a label between
    0 and 1, log and spherical average both outcomes, with y the weight of the first.

    Args:
        values: `[V]` in [0, 1].
        labels: `[N]` in [0, 1].

    Raises:
        ValueError: a value or a label lies outside [0, 1].

    Reference:
        Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", 2007.

    Example:
        >>> compute_proper_scores(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1.0]), "brier")
        tensor([[0.0000, 0.7500, 1.0000]])
    """
    for name, tensor in (("values", values), ("labels", labels)):
        if not ((tensor >= 0) & (tensor <= 1)).all():
            raise ValueError(f"{name} must lie in [0, 1], got {tensor.tolist()}")
    v, y = values[None, :], labels[:, None]
    if score == "brier":
        return 1 - (y - v).square()
    if score == "log":
        right, wrong = (1 - p.clamp(min=LEAST).log() / math.log(LEAST) for p in (v, 1 - v))
    else:
        length = (v.square() + (1 - v).square()).sqrt()
        right, wrong = v / length, (1 - v) / length
    return y * right + (1 - y) * wrong


def compute_expected_score_loss(logprobs: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
    """`[]` minus the weighted expected scores of `R` pairs of a value and a row.

        ℓ = -Σᵢᵥ wᵢ · πᵢ(v) · score(v, yᵢ)

    It is a sum over values, so the values of a row may be divided between micro-batches. Its
    gradient is the expectation over v of the sampled one, wᵢ · score · ∇ log πᵢ(v), without its
    variance. `logprobs` are nats, the sum over the tokens of the value.
    """
    loss: Tensor = -(weights * scores * logprobs.exp()).sum()
    return loss
