"""Steps that are all the same operations on the same memory: on a GPU, one graph for all of them.

A step of a small model keeps the host busier than the GPU. Captured, its kernels are launched at
once. Shapes must not change, so the columns of the tokens to come are there from the beginning, and
masked; a shape that does not last is not worth a capture.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlx.sampler.plain_decoder import PlainDecoder
from rlx.sampler.shared_attention import StepAttention
from rlx.sampler.shared_cache import AncestorLevel, RowSuffixes

__all__ = ["COLUMNS", "WARM_UP", "CapturedSteps"]

COLUMNS = 64
"""Columns of one shape: more are computed for nothing, fewer are captured more often."""
WARM_UP = 4
"""Steps of a shape before it is captured."""


class CapturedSteps:
    """Reads one token per row at a time; on a CPU the same way, without a graph.

    Args:
        decoder: what computes.
        levels: ancestors, with that of every row.
        suffix: of which columns are filled in place.
        read: tokens of each row, ancestors and all.

    Attributes:
        until: columns of the suffixes that can be filled.
    """

    def __init__(
        self,
        decoder: PlainDecoder,
        levels: Sequence[tuple[AncestorLevel, list[int]]],
        suffix: RowSuffixes,
        read: list[int],
    ) -> None:
        self.until = min(suffix.room, (suffix.longest // COLUMNS + 1) * COLUMNS)
        self._decoder = decoder
        self._attention = StepAttention(decoder, levels, suffix, read, self.until)
        self._tokens = torch.zeros(
            len(read), dtype=torch.int64, device=decoder.template_tensor.device
        )
        self._warm_up = WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = decoder.template_tensor.new_empty(0)
        self._angles = decoder.template_tensor.new_empty(0)

    def step(self, tokens: Tensor) -> Tensor:
        """Returns `[R, V]` logits behind `tokens` `[R]`, which hold until the next step."""
        self._tokens.copy_(tokens)
        if self._warm_up or not self._tokens.is_cuda:
            self._warm_up -= 1
            return self._step()
        if self._graph is None:
            self._angles = self._decoder.angles  # else others could have them freed
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):  # records, and computes nothing
                self._logits = self._step()
        self._graph.replay()
        return self._logits

    def _step(self) -> Tensor:
        attention = self._attention
        attention.advance()
        hidden = self._decoder.compute_hidden_states(
            self._tokens, attention.positions, attention.longest, attention
        )
        return self._decoder.logits(hidden)
