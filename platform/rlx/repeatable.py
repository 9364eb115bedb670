"""Gathers and sums that are equal to the bit every time, on a GPU too.

There, `index_select` and `index_add` add with atomic operations, in the order in which threads come
by, whenever an index is repeated; the gradient of the first is the second. Indexing, and
`index_put` with accumulation, sort their indices first. On a CPU it is the other way round.
"""

import torch
from torch import Tensor

__all__ = ["sum_by_slot", "take_rows"]


def take_rows(states: Tensor, at: Tensor) -> Tensor:
    """Gathers `[M, ...]` rows of `[N, ...]`; the gradients of a row that is taken several times
    are added in the same order every time.

    Args:
        states: `[N, ...]`.
        at: `[M]` int64 indices.
    """
    return states[at] if states.is_cuda else states.index_select(0, at)


def sum_by_slot(values: Tensor, slots: Tensor, count: int) -> Tensor:
    """Sums `[K]` values by slot into `[count]`, in the same order every time.

    Args:
        values: `[K]`.
        slots: `[K]` int64, each below `count`.
        count: number of slots; one without values gets 0.
    """
    zeros = values.new_zeros(count)
    if values.is_cuda:
        return torch.index_put(zeros, (slots,), values, accumulate=True)
    return zeros.index_add(0, slots, values)
