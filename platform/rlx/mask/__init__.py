"""Which tokens learn."""

from typing import Literal

import torch
from torch import Tensor

from rlx.batch import TokenBatch

__all__ = ["turn_spans"]


def turn_spans(
    batch: TokenBatch,
    *,
    fallback: Literal["response", "none"] = "response",
    include_eos: bool = True,
) -> Tensor:
    """A row's own tokens inside any of its spans, tags included.

    Args:
        batch: the rows; spans are those that each kind of turn declares in YAML.
        fallback: for a row in which none of its spans was found. "response": all of its own
            tokens learn, so that format failures are corrected. "none": none does.
        include_eos: the token that ends a turn learns as well.

    Returns:
        `[B, T]` bool.

    Reference:
        Design 004: M_ans is think + answer, M_conf is analysis + confidence.
    """
    mask = torch.zeros_like(batch.is_own)
    for span in batch.spans.values():
        mask |= span
    found = mask.any(dim=1, keepdim=True)
    if include_eos:
        mask |= batch.is_end & found
    if fallback == "response":
        mask |= batch.is_own & ~found
    return mask & batch.is_own
