"""Tensor implementations of the estimator and the mask."""

from torch import Tensor

from rlx.batch import TokenBatch
from rlx.credit import CreditInputs, group_advantages, spread_over_mask, total_scores
from rlx_example.descriptors import LeaveOneOut


def leave_one_out(inputs: CreditInputs, options: LeaveOneOut) -> Tensor:
    """Aᵢ = sᵢ - mean of the other s of the group = (sᵢ - mean) · n / (n - 1); 0 when alone.

    Returns:
        `[B, T]` advantages, 0 outside the mask.
    """
    centred = group_advantages(total_scores(inputs), inputs.group_ids, normalize="center")
    _, slot, counts = inputs.group_ids.unique(return_inverse=True, return_counts=True)
    sizes = counts[slot].to(centred.dtype)
    return spread_over_mask(options.scale * centred * sizes / (sizes - 1).clamp(min=1), inputs.mask)


def one_span(batch: TokenBatch, *, span: str) -> Tensor:
    """`[B, T]` bool: a row's own tokens in `span`, or all its own tokens if there are none."""
    if span not in batch.spans:
        return batch.is_own.clone()
    inside = batch.spans[span] & batch.is_own
    return inside | (batch.is_own & ~inside.any(dim=1, keepdim=True))
