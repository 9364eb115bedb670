"""Estimators on one score per rollout: from `[B]` scores to `[B]` advantages.

They differ only in baseline and scale. GRPO and Dr. GRPO are
`group_advantages` itself, with and without the division by σ; REINFORCE++ with a group baseline
(arXiv 2501.03262) is Dr. GRPO, then whitened over the tokens of the batch.
"""

from typing import Unpack

import torch
from torch import Tensor

from rlx.credit.group import GroupAdvantageSettings, group_advantages
from rlx.spec import Alpha, Normalize

__all__ = [
    "compute_gpg_advantages",
    "compute_opo_advantages",
    "compute_pass_at_k_advantages",
    "compute_remax_advantages",
    "compute_rloo_advantages",
]


def compute_rloo_advantages(
    scores: Tensor, group_ids: Tensor, **how: Unpack[GroupAdvantageSettings]
) -> Tensor:
    """Score minus the mean of the other scores in its group, an unbiased baseline.

        Aᵢ = sᵢ - mean_{j≠i} sⱼ = n / (n - 1) · (sᵢ - mean)

    Args:
        scores: `[B]`.
        group_ids: `[B]` rows with equal ids are compared; any order, any group size.
        how: options of `group_advantages`.

    Returns:
        `[B]`; exactly 0 in a group whose scores are all equal.

    Reference:
        RLOO, arXiv 2402.14740.
    """
    centred = group_advantages(scores, group_ids, normalize="center", **how)
    _, slot, counts = group_ids.unique(return_inverse=True, return_counts=True)
    sizes: Tensor = counts[slot]
    return centred * sizes / (sizes - 1).clamp(min=1)


def compute_opo_advantages(
    scores: Tensor, lengths: Tensor, group_ids: Tensor, **how: Unpack[GroupAdvantageSettings]
) -> Tensor:
    """Score minus the length-weighted mean of its group, the minimum-variance baseline.

        Aᵢ = sᵢ - Σⱼ Lⱼ sⱼ / Σⱼ Lⱼ

    Args:
        scores: `[B]`.
        lengths: `[B]` number of learning tokens. A group without any uses the plain mean.
        group_ids: `[B]` rows with equal ids are compared; any order, any group size.
        how: options of `group_advantages`.

    Returns:
        `[B]`; exactly 0 in a group whose scores are all equal.

    Reference:
        OPO, arXiv 2505.23585.
    """
    # Deviations from the plain mean are exact zeros for equal scores, and the weighted baseline
    # is the plain mean plus the weighted mean of the deviations.
    centred = group_advantages(scores, group_ids, normalize="center", **how)
    _, slot, counts = group_ids.unique(return_inverse=True, return_counts=True)
    zeros = scores.new_zeros(len(counts))
    weights = lengths.to(scores.dtype)
    tokens = zeros.index_add(0, slot, weights).clamp(min=1)
    baseline = zeros.index_add(0, slot, weights * centred) / tokens
    return centred - torch.where(counts == 1, 0.0, baseline)[slot]


def compute_gpg_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    alpha: Alpha = "scores",
    f_norm: float = 1.0,
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """Score minus the mean of its group, scaled up to make up for rows or groups without signal.

        Aᵢ = α · (sᵢ - mean) / F_norm
        scores:  α = rows / rows whose score is not 0
        groups:  α = groups / groups whose scores differ

    Args:
        scores: `[B]` of the whole optimiser step, because α counts over all of them.
        group_ids: `[B]` rows with equal ids are compared; any order, any group size.
        alpha: what is counted: "groups" as in the paper, "scores" as in verl.
        f_norm: constant divisor.
        how: options of `group_advantages`.

    Returns:
        `[B]`; exactly 0 in a group whose scores are all equal.

    Reference:
        GPG, arXiv 2504.02546.
    """
    centred = group_advantages(scores, group_ids, normalize="center", **how)
    if alpha == "scores":
        everything, counted = len(scores), int((scores != 0).sum())
    else:
        everything, counted = len(group_ids.unique()), len(group_ids[centred != 0].unique())
    return centred * (everything / max(counted, 1) / f_norm)


def compute_pass_at_k_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    normalize: Normalize = "std",
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """Only the best row of a group learns, by its lead over the second best.

        std:     A_best = (s_best - s_second) / (σ + ε)        all others 0
        center:  A_best = s_best - s_second

    Args:
        scores: `[B]`.
        group_ids: `[B]` rows with equal ids are compared; any order, any group size.
        normalize: "std" divides by the deviation of the group, "center" does not.
        how: options of `group_advantages`.

    Returns:
        `[B]`; exactly 0 if several rows share the best score, and in a group of one.

    Reference:
        Pass@k policy gradient, arXiv 2503.19595.
    """
    # The lead in advantage equals the lead in score over σ + ε: the mean cancels.
    advantages = group_advantages(scores, group_ids, normalize=normalize, **how)
    _, slot, counts = group_ids.unique(return_inverse=True, return_counts=True)
    lowest = scores.new_full((len(counts),), -torch.inf)
    best = lowest.scatter_reduce(0, slot, advantages, "amax")
    is_best = advantages == best[slot]
    others = advantages.masked_fill(is_best, -torch.inf)
    second = lowest.scatter_reduce(0, slot, others, "amax")
    winners = torch.zeros_like(counts).index_add(0, slot, is_best.to(counts.dtype))
    has_lead = (winners == 1) & (counts > 1)
    return torch.where(is_best & has_lead[slot], (best - second)[slot], 0.0)


def compute_remax_advantages(scores: Tensor, greedy_scores: Tensor) -> Tensor:
    """Score minus the score of the greedy answer to the same prompt, `[B]`.

        Aᵢ = sᵢ - s_greedy

    Args:
        scores: `[B]`.
        greedy_scores: `[B]` score of the greedy answer to the row's prompt.

    Reference:
        ReMax, arXiv 2310.10505.
    """
    return scores - greedy_scores
