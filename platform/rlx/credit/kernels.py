"""Fast forms of operations on `[B, T]`, each with the formula that it equals.

A recursion Aₜ = xₜ + c·Aₜ₊₁ is computed block by block, as a product with the triangle of powers
of c. It never divides by a power, so any c in [0, 1] and any length are safe.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_ELEMENTS = 2**18
"""Tokens in a block of rows: above some 16 MiB, an intermediate tensor costs more in fresh pages
than in arithmetic, while those of a block stay in the processor's cache."""
_BLOCK = 32
"""Tokens of a row per matrix product."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def select_masked(mask: Tensor, x: Tensor) -> Tensor:
    """`torch.where(mask, x, 0)`: multiplies bits by 1 or 0, so that NaN cannot leak past the mask.

    Args:
        mask: `[B, T]` bool.
        x: `[B, T]`, or `[B, 1]` for one number per row.
    """
    bits = _BITS[x.itemsize]
    return (x.view(bits) * mask.to(bits)).view(x.dtype)


def map_row_blocks(
    function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """`function(*tensors)`, in blocks of rows.

    Args:
        function: from blocks of `tensors` to tensors with the same rows.
        tensors: `[B, T]`.
    """
    height = max(_ELEMENTS // max(tensors[0].shape[1], 1), 1)
    if len(tensors[0]) <= height:
        return function(*tensors)
    blocks = zip(*(x.split(height) for x in tensors), strict=True)
    results = zip(*(function(*block) for block in blocks), strict=True)
    return tuple(torch.cat(pieces) for pieces in results)


def compute_decayed_sums(x: Tensor, factor: float) -> Tensor:
    """`[B, T]` Aₜ = xₜ + factor · Aₜ₊₁.

    A matrix product computes each block. The first A of each block then obeys the same recursion
    with factor^block, and later blocks reach into a block through the first A after it.
    """
    width, short = x.shape[1], -x.shape[1] % _BLOCK
    within, beyond = _compute_decay_powers(factor, x.dtype, x.device)
    sums = (pad(x, (0, short)) if short else x).unflatten(1, (-1, _BLOCK)) @ within
    if width > _BLOCK:
        behind = shift_left(compute_decayed_sums(sums[:, :, 0], factor**_BLOCK))
        sums.addcmul_(behind[:, :, None], beyond)
    inner: Tensor = sums.flatten(1)[:, :width]
    return inner


@lru_cache(maxsize=64)
def _compute_decay_powers(
    factor: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`[block, block]` weight of token j in token i ≤ j, and `[block]` that of the next block."""
    at = torch.arange(_BLOCK, dtype=torch.float64, device=device)
    ahead = at[:, None] - at[None, :]
    within = torch.where(ahead >= 0, factor ** ahead.clamp(min=0), 0.0)
    return within.to(dtype), (factor ** (_BLOCK - at)).to(dtype)


def compute_chained_sums(x: Tensor, factors: Tensor) -> Tensor:
    """`[B, T]` Aₜ = xₜ + factorsₜ · Aₜ₊₁, by doubling the distance that each token covers."""
    reach = 1
    while reach < x.shape[1]:
        x = torch.addcmul(x, factors, shift_left(x, reach))
        factors = factors * shift_left(factors, reach)
        reach *= 2
    return x


def shift_left(x: Tensor, by: int = 1) -> Tensor:
    """The column `by` places to the right; 0 past the end."""
    return pad(x[:, by:], (0, by))


def apply_on_steps(recursion: Callable[..., Tensor], steps: Tensor, *streams: Tensor) -> Tensor:
    """Applies a recursion to the steps of each row, as if nothing stood between them.

    Args:
        recursion: from streams whose first columns are the steps of each row to `[B, T']`.
        steps: `[B, T]` bool.
        streams: `[B, T]`; 0 outside the steps.

    Returns:
        `[B, T]`; positions outside the steps are undefined.
    """
    ones = steps.view(torch.int8)
    begins = (ones[:, 1:] > ones[:, :-1]).sum(dim=1, dtype=torch.int32) + ones[:, :1].sum(dim=1)
    if (begins <= 1).all():  # nothing stands between the steps
        return recursion(*streams)
    # A step goes to the column of its number among the steps, from 1. Everything else goes to
    # column 0, which is never read.
    counts = steps.cumsum(dim=1)
    width = int(counts[:, -1].max()) + 1
    numbers = select_masked(steps, counts)
    packed = (x.new_zeros(len(x), width).scatter_(1, numbers, x)[:, 1:] for x in streams)
    return pad(recursion(*packed), (1, 0)).gather(1, numbers)
