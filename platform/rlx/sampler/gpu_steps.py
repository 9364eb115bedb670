"""Decoding steps on a GPU, with fixed shapes and memory, replayed as one CUDA graph.

For a small model, launching kernels takes longer than running them. Shapes must not change, so the
columns of future tokens are allocated in advance and masked.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from rlx.errors import is_out_of_memory
from rlx.sampler.plain_decoder import PlainDecoder
from rlx.sampler.shared_attention import AncestorLevel, RowSuffixes, StepAttention

COLUMNS = 64
"""Columns per shape: more columns waste computation, fewer need more captures."""
WARM_UP = 4
"""Steps with a shape before it is captured: short-lived shapes are not worth it."""
CAPTURING = threading.Lock()
"""Held during a capture: a process captures one graph at a time."""


@cache
def _get_capture_stream() -> torch.cuda.Stream:
    """The stream of all captures, with a priority, and thus a pool, of its own: a usual new one
    could be that on which another thread's ranks communicate."""
    return torch.cuda.Stream(priority=-1)


class CapturedSteps:
    """Reads one token per row at a time; on a CPU with the same operations, without a graph.

    Attributes:
        until: number of suffix columns that can be filled.
    """

    def __init__(
        self,
        decoder: PlainDecoder,
        levels: Sequence[tuple[AncestorLevel, list[int]]],
        suffix: RowSuffixes,
        read: list[int],
    ) -> None:
        self._decoder = decoder
        self.until = min(suffix.room, (suffix.longest // COLUMNS + 1) * COLUMNS)
        self._attention = StepAttention(decoder, levels, suffix, read, self.until)
        self._tokens = torch.zeros(
            len(read), dtype=torch.int64, device=decoder.template_tensor.device
        )
        self._warm_up = WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = decoder.template_tensor.new_empty(0)
        self._angles = decoder.template_tensor.new_empty(0)

    def step(self, tokens: Tensor) -> Tensor:
        """Returns the `[R, V]` logits after `tokens` `[R]`; overwritten by the next step."""
        self._tokens.copy_(tokens)
        if self._warm_up or not self._tokens.is_cuda:
            self._warm_up -= 1
            return self._step()
        if self._graph is None:
            self._angles = self._decoder.angles  # keeps the tensor alive while the graph uses it
            # In a capture, PyTorch's cache of memory cannot be given back, and each capture takes
            # memory that only this makes available again.
            with CAPTURING:
                torch.cuda.empty_cache()
                try:
                    self._graph = self._record()
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    torch.cuda.empty_cache()  # also of what the failed capture has left
                    self._graph = self._record()
        self._graph.replay()
        return self._logits

    def _record(self) -> torch.cuda.CUDAGraph:
        """Records one step on the stream of captures.

        Another thread may train meanwhile, so only this thread's calls may not break the capture.
        `torch.cuda.graph` would synchronize, and a failed capture would leave the thread on the
        capturing stream.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_get_capture_stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._logits = self._step()
            except BaseException:
                with suppress(RuntimeError):  # what follows from the first error
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _step(self) -> Tensor:
        attention = self._attention
        attention.advance()
        hidden = self._decoder.compute_hidden_states(
            self._tokens, attention.positions, attention.longest, attention
        )
        return self._decoder.logits(hidden)
