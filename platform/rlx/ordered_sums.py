"""Gathers and sums that are equal to the bit every time, on a GPU too.

On CUDA, `index_add`, which is also the gradient of `index_select`, adds values of a repeated index
atomically, so their order changes from run to run. Indexing, and `index_put` with accumulation,
sort their indices first. On a CPU, `index_add` has a fixed order, and indexing with several threads
may have none.
"""

import torch
from torch import Tensor


def take_rows(states: Tensor, at: Tensor) -> Tensor:
    """Gathers `[M, ...]` rows of `[N, ...]`; the gradients of a row that is taken several times are
    added in the same order every time."""
    return states[at] if states.is_cuda else states.index_select(0, at)


def sum_by_slot(values: Tensor, slots: Tensor, count: int) -> Tensor:
    """Sums `[K]` values by slot into `[count]`, in the same order every time."""
    zeros = values.new_zeros(count)
    if values.is_cuda:
        return torch.index_put(zeros, (slots,), values, accumulate=True)
    return zeros.index_add(0, slots, values)
