"""Compares scores within groups.

A group of equal scores carries no signal and gets exact zeros. This needs care with rounding:
twelve float32 scores of 0.7 miss their own mean by 1e-7, which divided by a deviation of 1e-7 plus
an epsilon of 1e-6 would give an advantage of 0.1.
"""

from typing import TypedDict

import torch
from torch import Tensor

from rlx.spec import Normalize, Singleton

__all__ = [
    "GroupAdvantageSettings",
    "compute_group_extremes",
    "group_advantages",
    "has_score_spread",
]

ROUNDING = 16
"""Scores within this many units in the last place count as equal: a reward that was spread over
tokens, or averaged over turns, comes back with an error of a few units.
"""


class GroupAdvantageSettings(TypedDict, total=False):
    """Settings of a group comparison; see `group_advantages`."""

    ddof: int
    eps: float
    singleton: Singleton
    tolerance: float


def group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    normalize: Normalize = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    tolerance: float = 0.0,
) -> Tensor:
    """Score minus the mean of its group, optionally divided by the group's deviation.

        std:     Aᵢ = (sᵢ - mean) / (σ + ε)        center:  Aᵢ = sᵢ - mean

    Args:
        scores: `[B]`.
        group_ids: `[B]` rows with equal ids are compared; any order, any group size.
        normalize: "std" divides, "center" does not (Dr. GRPO).
        ddof: σ² is the sum of squares over n - ddof.
        eps: added to σ.
        singleton: advantage in a group of one: 0, or the raw score (mean 0, σ 1, as in verl).
        tolerance: a group whose scores differ by at most this much has no signal.

    Returns:
        `[B]` in the dtype of `scores`; exactly 0 in a group whose scores are equal up to
        rounding; NaN in a group that holds NaN.

    Reference:
        DeepSeekMath (GRPO), arXiv 2402.03300, section 4.1; Dr. GRPO, arXiv 2503.20783.

    Example:
        >>> group_advantages(torch.tensor([1, 0, .5]), torch.tensor([4, 4, 4]), normalize="center")
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    _, slot, counts = group_ids.unique(return_inverse=True, return_counts=True)
    zeros = scores.new_zeros(len(counts))
    highest, lowest = compute_group_extremes(scores, slot, len(counts))
    centred = scores - (zeros.index_add(0, slot, scores) / counts)[slot]
    advantages = centred
    if normalize == "std":
        squares = zeros.index_add(0, slot, centred.square())
        deviation = (squares / (counts - ddof).clamp(min=1)).sqrt()
        advantages = centred / (deviation[slot] + eps)
    has_signal = has_score_spread(highest, lowest, tolerance)[slot]
    advantages = torch.where(has_signal, advantages, scores.new_zeros(()))
    if singleton == "raw":
        raw = scores / (1 + eps) if normalize == "std" else scores
        advantages = torch.where(counts[slot] == 1, raw, advantages)
    return advantages


def compute_group_extremes(scores: Tensor, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest and smallest score of each group, `[G]` each; NaN in a group that contains NaN.

    Args:
        scores: `[B]`.
        slot: `[B]` the row's group, from 0 to G - 1; no group is empty.
        count: G.
    """
    edge = scores.new_zeros(count)
    highest = edge.scatter_reduce(0, slot, scores, "amax", include_self=False)
    lowest = edge.scatter_reduce(0, slot, scores, "amin", include_self=False)
    return highest, lowest


def has_score_spread(highest: Tensor, lowest: Tensor, tolerance: float = 0.0) -> Tensor:
    """`[...]` bool whether a group's scores differ by more than rounding and tolerance.

    Args:
        highest: `[...]` the largest score of each group.
        lowest: `[...]` the smallest score of each group.
        tolerance: the largest difference at which scores still count as equal.

    Returns:
        Also True where a score is NaN, so that NaN is not mistaken for a lack of signal.
    """
    number = torch.finfo(highest.dtype)
    rounding = torch.maximum(highest.abs(), lowest.abs()) * (ROUNDING * number.eps)
    # Below the smallest normal number, units in the last place are no longer relative.
    same = highest - lowest <= rounding + number.tiny + tolerance
    return ~same
