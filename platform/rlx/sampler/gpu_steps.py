"""Decoding steps on a GPU: with fixed shapes and memory, replayed as one CUDA graph, and with flash
attention where PyTorch has it.

For a small model, launching kernels takes longer than running them; a captured graph launches all
kernels at once. Shapes must not change, so the columns of future tokens are allocated in advance
and masked. A shape is captured only after a few steps, since short-lived shapes are not worth it.

With flash attention, the queries of all rows below an ancestor read its keys once, whatever its
length, and every row reads just the keys that it has. Nothing is masked, so one graph serves a
whole turn. The parts are merged by their log-sum-exp.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from rlx.errors import is_out_of_memory
from rlx.sampler.plain_decoder import PlainDecoder
from rlx.sampler.shared_attention import AncestorLevel, RowSuffixes, StepAttention, split_by_layer

WIDEST = 256
"""Maximum dimension of a head."""


def can_use_flash(decoder: PlainDecoder) -> bool:
    """Whether PyTorch has flash attention for a decoder's device, dtype and heads."""
    like = decoder.template_tensor
    return (
        like.is_cuda
        and like.dtype in (torch.bfloat16, torch.float16)
        and decoder.width <= WIDEST
        and decoder.width % 8 == 0
        and torch.backends.cuda.is_flash_attention_available()
    )


def attend_sequences(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    lengths: Tensor,
    most: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention within each of `S` sequences, in which every query sees all keys.

    Args:
        queries: `[Q, heads, width]`, sequence after sequence.
        keys, values: `[K, heads, width]`, likewise.
        query_starts, key_starts: `[S + 1]` int32, first query and first key of each sequence.
        lengths: `[S]` int32, keys of each sequence that are there.
        most: maximum queries and keys of a sequence.
        scale: factor of the scores.

    Returns:
        `[Q, heads, width]` outputs, and `[heads, Q]` float32 log-sum-exp of the scores.
    """
    output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        query_starts,
        key_starts,
        *most,
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=lengths,
    )
    return output, logsumexp


class _Sequences:
    """Keys and values of sequences, each with the queries of some rows.

    Args:
        keys, values: `[layers, kv_heads, S, L, width]`, contiguous; not copied.
        lengths: `[S]` int32, may be changed between calls.
        at: index of each row's sequence.
        rep: queries per row and key-value head.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, lengths: Tensor, at: Sequence[int], rep: int
    ) -> None:
        device, count, longest = keys.device, keys.shape[2], keys.shape[3]
        self._keys, self._values = _list_tokens(keys), _list_tokens(values)
        self._lengths, self._rep = lengths, rep
        order = sorted(range(len(at)), key=at.__getitem__)
        self._order = self._back = None  # rows by sequence, and the way back
        if order != list(range(len(at))):
            self._order = torch.tensor(order, device=device)
            self._back = self._order.argsort()
        below = torch.bincount(torch.tensor(at), minlength=count) * rep
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), below.cumsum(0)])
        self._query_starts = starts.to(device, torch.int32)
        self._key_starts = torch.arange(count + 1, dtype=torch.int32, device=device) * longest
        self._most = int(below.max()), longest

    def attend(self, layer: int, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Takes `[R, rep, kv_heads, width]` queries; returns outputs of that shape, and `[R, rep,
        kv_heads, 1]` log-sum-exp."""
        if self._order is not None:
            q = q.index_select(0, self._order)
        output, logsumexp = attend_sequences(
            q.flatten(0, 1),
            self._keys[layer],
            self._values[layer],
            self._query_starts,
            self._key_starts,
            self._lengths,
            self._most,
            scale,
        )
        output, total = output.view_as(q), logsumexp.t().reshape(*q.shape[:3], 1)
        if self._back is None:
            return output, total
        return output.index_select(0, self._back), total.index_select(0, self._back)


def _list_tokens(states: Tensor) -> tuple[Tensor, ...]:
    """Returns for each layer a view `[S · L, kv_heads, width]` of its keys or values."""
    layers, heads, count, length, width = states.shape
    return states.permute(0, 2, 3, 1, 4).view(layers, count * length, heads, width).unbind()


class FlashStepAttention:
    """Does what `rlx.sampler.shared_attention.StepAttention` does, for `until` all of the room.

    Attributes:
        positions: `[R]` position of the token being read.
        longest: exclusive upper bound on the positions.
    """

    def __init__(
        self,
        decoder: PlainDecoder,
        levels: Sequence[tuple[AncestorLevel, list[int]]],
        suffix: RowSuffixes,
        read: list[int],
    ) -> None:
        device, count = decoder.template_tensor.device, len(read)
        self._scale = decoder.scale
        self._shape = count, decoder.kv_heads, decoder.heads // decoder.kv_heads, decoder.width
        rep = self._shape[2]
        suffix.blank(suffix.room)
        self._keys, self._values = split_by_layer(suffix.keys), split_by_layer(suffix.values)
        self.positions = torch.tensor(read, device=device) - 1
        self.longest = max(read) + suffix.room
        self._columns = torch.tensor(suffix.lengths, device=device) - 1
        self._own_lengths = torch.tensor(suffix.lengths, dtype=torch.int32, device=device)
        # Where the new keys and values go: each key-value head has its own row.
        heads = torch.arange(decoder.kv_heads, device=device)[:, None] * count
        self._places = heads + torch.arange(count, device=device)
        own = _Sequences(suffix.keys, suffix.values, self._own_lengths, range(count), rep)
        self._parts = [own]
        for level, at in levels:
            lengths = torch.tensor(level.lengths, dtype=torch.int32, device=device)
            keys, values = level.keys.mT.contiguous(), level.values.contiguous()
            self._parts.append(_Sequences(keys, values, lengths, at, rep))

    def advance(self) -> None:
        """Advances to the next token."""
        self.positions += 1
        self._columns += 1
        self._own_lengths += 1

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for kept, new in ((self._keys[layer], k), (self._values[layer], v)):
            kept[self._places, self._columns] = new.transpose(0, 1)
        queries = q.view(self._shape).transpose(1, 2).contiguous()
        found = [part.attend(layer, queries, self._scale) for part in self._parts]
        output = found[0][0]
        if len(found) > 1:
            shares = torch.stack([total for _, total in found]).softmax(dim=0)
            mixed = output * shares[0]
            for (part, _), share in zip(found[1:], shares[1:], strict=True):
                mixed = torch.addcmul(mixed, part, share)
            output = mixed.to(q.dtype)
        return output.transpose(1, 2).reshape(len(q), -1)


COLUMNS = 64
"""Columns per shape: more columns waste computation, fewer need more captures."""
WARM_UP = 4
"""Steps with a shape before it is captured."""
CAPTURING = threading.Lock()
"""Held during a capture: a process captures one graph at a time."""


@cache
def _get_capture_stream() -> torch.cuda.Stream:
    """The stream of all captures of this process, which captures for one graph at a time.

    It has a priority, and thus a pool, of its own: a new stream of the usual one could be the one
    on which another thread's ranks communicate.
    """
    return torch.cuda.Stream(priority=-1)


class CapturedSteps:
    """Reads one token per row at a time; on a CPU with the same operations, without a graph.

    Args:
        decoder: computes the model.
        levels: ancestor levels, each with the index of every row's ancestor.
        suffix: row suffixes; new columns are filled in place.
        read: tokens read so far per row, ancestors included.
        flash: use `FlashStepAttention`, whose cost does not depend on `until`.

    Attributes:
        until: number of suffix columns that can be filled.
    """

    def __init__(
        self,
        decoder: PlainDecoder,
        levels: Sequence[tuple[AncestorLevel, list[int]]],
        suffix: RowSuffixes,
        read: list[int],
        *,
        flash: bool = False,
    ) -> None:
        self._decoder = decoder
        self._attention: StepAttention | FlashStepAttention
        if flash:
            self.until = suffix.room
            self._attention = FlashStepAttention(decoder, levels, suffix, read)
        else:
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
            self._graph = self._capture()
        self._graph.replay()
        return self._logits

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Records one step without computing it.

        PyTorch's cache of memory is given back before: in a capture that is forbidden, and each
        capture takes memory that only this makes available again.
        """
        self._angles = self._decoder.angles  # keeps the tensor alive while the graph uses it
        with CAPTURING:
            torch.cuda.empty_cache()
            try:
                return self._record()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            torch.cuda.empty_cache()  # also of what the failed capture has left
            return self._record()

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
