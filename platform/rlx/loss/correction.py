"""Mismatch between the sampling policy and the learning policy, and weights that correct for it.

Both are compared before the update: μ uses the sampler's reported log-probabilities, π the
learner's. Engines round differently, and the sampler's weights may be older.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.loss.surrogates import LARGEST_LOG_RATIO
from rlx.spec import Correction


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
    """Correction weights for a step's tokens.

    Attributes:
        weights: `[B, T]` factors of the tokens' losses; 1 for tokens that μ did not sample.
        mean: mean weight over tokens or over rows, depending on `level`.
        share: share of those that were truncated or masked.
    """

    weights: Tensor
    mean: float
    share: float


def compute_sampler_mismatch(learner: Tensor, sampler: Tensor, mask: Tensor) -> Mismatch | None:
    """Compares log-probabilities of the same tokens.

    Args:
        learner: `[B, T]` nats under π.
        sampler: `[B, T]` nats under μ.
        mask: `[B, T]` bool learning tokens that μ sampled; nothing else is read.

    Returns:
        None if there is no such token.

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

    Args:
        learner, sampler, mask: see `compute_sampler_mismatch`.
        spec: kind, level and bounds.

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
