"""Operations on `[B, T]` at memory speed: in blocks of rows, with bitwise selection.

Above some 16 MiB, an intermediate tensor costs more in fresh pages than in arithmetic. Blocks are
small enough for all intermediates to stay in the processor's cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["map_row_blocks", "select_masked"]

_ELEMENTS = 2**18
"""Tokens in a block."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def map_row_blocks(
    function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor, inside: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Applies `function` to blocks of rows.

    Args:
        function: from blocks of `tensors` to tensors with the same rows.
        tensors: `[B, ...]`; the last one is `[B, T]`.
        inside: `[B, T]` bool; if given, the results of `function` are `[B, T]`, or `[B, 1]` for one
            number per row, and are masked by it.

    Returns:
        The same as `function` on all rows at once.
    """
    rows, width = tensors[-1].shape
    height = max(_ELEMENTS // max(width, 1), 1)
    outputs: tuple[Tensor, ...] = ()
    for start in range(0, max(rows, 1), height):
        block = slice(start, start + height)
        pieces = function(*(x[block] for x in tensors))
        if not outputs:
            shape = None if inside is None else inside.shape
            outputs = tuple(x.new_empty(shape or (rows, *x.shape[1:])) for x in pieces)
        here = tuple(output[block] for output in outputs)
        if inside is None:
            for output, piece in zip(here, pieces, strict=True):
                output.copy_(piece)
        else:
            _write_masked(inside[block], pieces, here)
    return outputs


def select_masked(mask: Tensor, *streams: Tensor) -> tuple[Tensor, ...]:
    """Each stream inside the mask, and 0 elsewhere.

    Multiplies bits, not numbers, by 1 or 0, so that NaN cannot leak past the mask. `torch.where` is
    equivalent but processes one number at a time.

    Args:
        mask: `[B, T]` bool.
        streams: `[B, T]`, or `[B, 1]` for one number per row.
    """
    return _write_masked(mask, streams, tuple(x.new_empty(mask.shape) for x in streams))


def _write_masked(
    mask: Tensor, streams: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Writes each masked stream into its output."""
    ones = {size: mask.to(_BITS[size]) for size in {x.itemsize for x in streams}}
    for x, output in zip(streams, outputs, strict=True):
        bits = _BITS[x.itemsize]
        torch.mul(x.view(bits), ones[x.itemsize], out=output.view(bits))
    return outputs
