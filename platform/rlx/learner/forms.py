"""Ways (forms) to run the model on packed rows; all compute the same outputs.

There is one per kind of device: block-sparse flex attention on a GPU, attention in blocks of tokens
on a CPU. A model that admits no mask of ours reads what rows share once and continues its KV cache
with gradient. Plain rows, without sharing, judge all. The number of calls of the model must not
depend on the micro-batch: under ZeRO stage 3 every call gathers weights from all ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from rlx.learner.pack import PackedBatch
from rlx.ordered_sums import take_rows

PACKED = "rlx_packed"
"""Name under which the attention function is registered with transformers."""

SMALLEST = 64
"""Minimum tokens per block."""
PATHS_PER_BLOCK = 4
"""Maximum ratio of path length to block length; bounds the gathered keys."""
AS_LONG = 0.85
"""Blocks are computed together if they have at least this fraction of the largest one's keys."""

UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments with which a model requests features that this attention lacks."""


@dataclass(frozen=True, eq=False, slots=True)
class AttentionBlocks:
    """Partition of a micro-batch of `L` tokens into attention blocks.

    Attributes:
        queries: `[Q]` tokens, block after block, padded.
        keys: `[K]` tokens that each block attends to, padded.
        outputs: `[L]` index of each token among the queries.
        sizes: (blocks, queries per block, keys per block) for each group of blocks that are
            computed together.
        masks: for each group, `[blocks, 1, queries, keys]` float32, added to scores: -inf where a
            query must not attend. A bool mask would be converted, and kept, by every layer.
        query_positions, key_positions: for each group, `[blocks, queries or keys]`, position of
            each token in its row.
        length: tokens of the longest row.
        windowed: masks by window, filled on first use.
    """

    queries: Tensor
    keys: Tensor
    outputs: Tensor
    sizes: tuple[tuple[int, int, int], ...]
    masks: tuple[Tensor, ...]
    query_positions: tuple[Tensor, ...]
    key_positions: tuple[Tensor, ...]
    length: int
    windowed: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    @classmethod
    def from_positions(cls, positions: Tensor, ends: Tensor) -> "AttentionBlocks":
        """Partitions a micro-batch, whose `[L]` positions and ends are those of `PackedBatch`."""
        device, length = ends.device, int(positions.max()) + 1
        ends, places = ends.cpu(), positions.cpu()
        tokens = torch.arange(len(ends)).split(max(SMALLEST, length // PATHS_PER_BLOCK))
        paths = [torch.cat([(ends[: t[0]] > t[0]).nonzero()[:, 0], t]) for t in tokens]
        buckets: list[list[int]] = []
        for block in sorted(range(len(tokens)), key=lambda n: len(paths[n]), reverse=True):
            if not buckets or len(paths[block]) < AS_LONG * len(paths[buckets[-1][0]]):
                buckets.append([])
            buckets[-1].append(block)
        query_rows = [_stack_token_rows([tokens[n] for n in bucket]) for bucket in buckets]
        key_rows = [_stack_token_rows([paths[n] for n in bucket]) for bucket in buckets]
        queries = torch.cat([q.flatten() for q in query_rows])
        outputs = torch.empty_like(ends)
        real = (queries >= 0).nonzero()[:, 0]
        outputs[queries[real]] = real
        masks = []
        for q, k in zip(query_rows, key_rows, strict=True):
            query, key = q[:, :, None], k[:, None, :]
            visible = (key >= 0) & (key <= query) & (query < ends[k.clamp(min=0)][:, None, :])
            # Padding attends to the first key, since a softmax over nothing is NaN.
            seen = torch.where(query >= 0, visible, torch.arange(k.shape[1]) == 0)[:, None]
            masks.append(torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(device))
        return cls(
            queries=queries.clamp(min=0).to(device),
            keys=torch.cat([k.flatten() for k in key_rows]).clamp(min=0).to(device),
            outputs=outputs.to(device),
            sizes=tuple((*q.shape, k.shape[1]) for q, k in zip(query_rows, key_rows, strict=True)),
            masks=tuple(masks),
            query_positions=tuple(places[q.clamp(min=0)].to(device) for q in query_rows),
            key_positions=tuple(places[k.clamp(min=0)].to(device) for k in key_rows),
            length=length,
        )

    def select_masks(self, window: int | None) -> tuple[Tensor, ...]:
        """The masks of a layer that sees `window` tokens, itself included; None: all."""
        if window is None or window >= self.length:
            return self.masks
        if window not in self.windowed:
            groups = zip(self.masks, self.query_positions, self.key_positions, strict=True)
            self.windowed[window] = tuple(
                mask.masked_fill((q[:, :, None] - k[:, None, :] >= window)[:, None], -torch.inf)
                for mask, q, k in groups
            )
        return self.windowed[window]


def _stack_token_rows(rows: list[Tensor]) -> Tensor:
    """Stacks rows to `[n, longest]`, padded with -1."""
    longest = max(map(len, rows))
    return torch.stack([pad(row, (0, longest - len(row)), value=-1) for row in rows])


def _compute_packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    rlx_layout: AttentionBlocks | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: `[1, heads, L, width]` in, `[1, L, heads, width]` out.
    Raises ValueError if the model requests something other than plain attention."""
    if rlx_layout is None:  # the model is not called on packed rows
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return torch.as_tensor(output), None
    if unsupported := [name for name in UNKNOWN if others.get(name) is not None]:
        raise ValueError(f"this model's attention uses {', '.join(unsupported)}")
    blocks, (_, heads, _, width) = rlx_layout, query.shape
    queries = _gather_tokens(query, blocks.queries)
    keys, values = _gather_tokens(key, blocks.keys), _gather_tokens(value, blocks.keys)
    lengths = [n * b for n, b, _ in blocks.sizes], [n * k for n, _, k in blocks.sizes]
    groups = zip(
        blocks.sizes,
        blocks.select_masks(sliding_window),
        queries.split(lengths[0]),
        keys.split(lengths[1]),
        values.split(lengths[1]),
        strict=True,
    )
    outputs = [
        _attend_blocks(
            q.unflatten(0, (n, b)), k.unflatten(0, (n, c)), v.unflatten(0, (n, c)), mask, scaling
        )
        for (n, b, c), mask, q, k, v in groups
    ]
    joined = torch.cat(outputs).index_select(0, blocks.outputs)
    return joined.view(1, -1, heads, width), None


def _gather_tokens(states: Tensor, tokens: Tensor) -> Tensor:
    """Gathers tokens of `[1, heads, L, width]` into `[tokens, heads, width]`."""
    flat = states[0].transpose(0, 1).flatten(1)
    return take_rows(flat, tokens).view(-1, states.shape[1], states.shape[3])


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attention of `[n, b, heads, width]` to `[n, k, heads, width]`; `[n · b, heads · width]`."""
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    fewer = query.shape[1] // key.shape[1]
    shares_heads = fewer > 1 and query.device.type == "cpu"  # GPU kernels need it unmasked
    if fewer > 1 and not shares_heads:
        key, value = repeat_kv(key, fewer), repeat_kv(value, fewer)
    output: Tensor = scaled_dot_product_attention(
        query, key, value, attn_mask=mask.to(query.dtype), scale=scaling, enable_gqa=shares_heads
    )
    return output.transpose(1, 2).reshape(query.shape[0] * query.shape[2], -1)


AttentionInterface.register(PACKED, _compute_packed_attention)


RECOMPILATIONS = 64
"""Kinds of inputs for which flex attention may be compiled; some six are expected. After more it
would silently compute all scores of a micro-batch."""


OutputReader = Callable[..., Tensor]
"""Calls a model with arguments by name, and returns its `[M, W]` outputs at `at`, its first one:
`[M]` indices of the flattened `[N · L]` input. In place of an `attention_mask` it takes
`visible`, `queries` and `keys`, as `rlx.model.build_attention_mask`."""


class ForwardForm(ABC):
    """A way to compute packed rows, called with a reader of the model; returns `[M, W]` outputs.

    Attributes:
        name: name in the run's record.
        merges: whether shared prefixes are computed once; otherwise every row is its own trie.
        attention: transformers' name of the attention; None for the model's default.
    """

    name: ClassVar[str]
    merges: ClassVar[bool] = True
    attention: ClassVar[str | None] = None

    @abstractmethod
    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """Returns the model's `[M, W]` outputs at the sources."""


class GroupedForm(ForwardForm):
    """Scaled-dot-product attention of blocks of tokens to their own paths."""

    name = "grouped attention"
    attention = PACKED

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        return read(
            packed.sources,
            input_ids=packed.token_ids[None],
            position_ids=packed.positions[None],
            # Ignored, but without it transformers would build a mask of L x L.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.ends.device),
            use_cache=False,
            rlx_layout=AttentionBlocks.from_positions(packed.positions, packed.ends),
        )


class FlexForm(ForwardForm):
    """Block-sparse flex attention; torch has no CPU backward pass for it."""

    name = "flex attention"
    attention = "flex_attention"
    _TILE: ClassVar[int] = 128

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        import torch._dynamo.config as compilation  # takes a second, and only a GPU needs it

        compilation.recompile_limit = RECOMPILATIONS
        length = -(-len(packed) // self._TILE) * self._TILE
        more = (0, length - len(packed))
        alone = torch.arange(len(packed), length, device=packed.ends.device) + 1
        ends = torch.cat([packed.ends, alone])

        def is_key_visible(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        mask = create_block_mask(
            is_key_visible, None, None, length, length, device=str(ends.device)
        )
        return read(
            packed.sources,
            input_ids=pad(packed.token_ids, more)[None],
            position_ids=pad(packed.positions, more)[None],
            attention_mask=mask,
            use_cache=False,
        )


LEVELS = 3
"""Calls of a cache with gradient: what all rows share, then, of each part below it, what all of its
rows share, such as a prompt, and then the rest."""


class CachedForm(ForwardForm):
    """Reads a trie level by level, each continuing the KV cache of the level above, through which
    gradients flow, with the model's own attention."""

    name = "a cache with gradient"

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        cache, device = DynamicCache(), packed.ends.device
        unread = torch.ones_like(packed.sources, dtype=torch.bool)
        outputs, order = [], []
        visible = keys = torch.zeros(0)  # which columns the cache has, and their positions
        for level, runs in enumerate(_split_levels(packed)):
            ids, positions, own = runs.build_rectangle(packed)
            real = (torch.arange(ids.shape[1]) < runs.lengths[:, None])[:, None].to(device)
            masked: dict[str, Tensor] = {}
            if level == 0:  # chains without padding on the left: the model's own mask is right
                visible, keys = real, positions
            else:
                parents = runs.parents.to(device)
                cache.batch_select_indices(parents)
                above = visible[parents].expand(-1, ids.shape[1], -1)
                keys = torch.cat([keys[parents], positions], dim=1)
                masked["visible"] = torch.cat([above, own[:, 0]], dim=-1)[:, None]
                masked |= {"queries": positions, "keys": keys}
                visible = torch.cat([visible[parents], real], dim=-1)
            here = (unread & runs.contains_tokens(packed.sources)).nonzero()[:, 0]
            at, unread[here] = runs.locate_tokens(packed.sources[here]), False
            ask = {"input_ids": ids, "position_ids": positions, **masked}
            outputs.append(read(at, **ask, past_key_values=cache, use_cache=True))
            order.append(here)
        return torch.cat(outputs).index_select(0, torch.cat(order).argsort())


class PlainForm(ForwardForm):
    """Computes every row separately, without sharing: the reference for the other forms."""

    name = "plain rows"
    merges = False

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        rows = _find_tries(packed)
        ids, _, _ = rows.build_rectangle(packed)
        # Padding is on the right and attention is causal, so no real token attends to it. Its
        # positions continue: transformers would treat a restart as another packed sequence and
        # build a mask over all pairs of tokens.
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return read(
            rows.locate_tokens(packed.sources),
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
        )


@dataclass(frozen=True, eq=False, slots=True)
class _TokenRuns:
    """`N` runs of consecutive tokens of a micro-batch, as rows of a padded rectangle.

    Attributes:
        starts, lengths: `[N]`, on the CPU, in order.
        parents: `[N]`, the run of the level above that each continues.
    """

    starts: Tensor
    lengths: Tensor
    parents: Tensor

    def contains_tokens(self, tokens: Tensor) -> Tensor:
        """Returns `[M]` bool: whether each token is in one of the runs."""
        run = self._run(tokens)
        starts, lengths = self.starts.to(tokens.device), self.lengths.to(tokens.device)
        return (run >= 0) & (tokens < (starts + lengths)[run])

    def locate_tokens(self, tokens: Tensor) -> Tensor:
        """Returns `[M]`, the index of each token in the flattened rectangle."""
        run, starts = self._run(tokens), self.starts.to(tokens.device)
        return run * int(self.lengths.max()) + tokens - starts[run]

    def _run(self, tokens: Tensor) -> Tensor:
        """Returns `[M]`, the last run that starts at or before each token; -1 for none."""
        return torch.searchsorted(self.starts.to(tokens.device), tokens, right=True) - 1

    def build_rectangle(self, packed: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `[N, L]` token ids and positions, and the `[N, 1, L, L]` bool attention mask."""
        column = torch.arange(int(self.lengths.max()))
        token = self.starts[:, None] + column
        real = column < self.lengths[:, None]
        token = token.where(real, self.starts[:, None]).to(packed.ends.device)
        ends = packed.ends[token].where(real.to(token.device), -1)
        query, key = token[:, :, None], token[:, None, :]
        causal = (column <= column[:, None]).to(token.device)
        sees = causal & (key <= query) & (query < ends[:, None, :])
        sees |= (column == column[:, None]).to(token.device)  # padding attends to itself
        return packed.token_ids[token], packed.positions[token], sees[:, None]


def _find_tries(packed: PackedBatch) -> _TokenRuns:
    starts = (packed.positions == 0).nonzero()[:, 0].cpu()
    lengths = torch.cat([starts[1:], torch.tensor([len(packed)])]) - starts
    return _TokenRuns(starts, lengths, torch.zeros_like(starts))


def _split_levels(packed: PackedBatch) -> Iterator[_TokenRuns]:
    """Yields the runs of `LEVELS` levels: of each part of a trie its trunk, which all of the part's
    paths share, then the parts below it. The last level has whole parts; a level without any run
    has the first token as a dummy."""
    ends, tries = packed.ends.tolist(), _find_tries(packed)
    parts = [(start, ends[start], 0) for start in tries.starts.tolist()]
    for _ in range(LEVELS - 1):
        trunks = [(start, _find_trunk_end(ends, start), parent) for start, _, parent in parts]
        yield _build_runs(trunks)
        stops = [stop for _, stop, _ in parts]
        parts = []
        for run, ((_, at, _), stop) in enumerate(zip(trunks, stops, strict=True)):
            while at < stop:
                parts.append((at, ends[at], run))
                at = ends[at]
    yield _build_runs(_join_siblings(parts))


def _find_trunk_end(ends: Sequence[int], start: int) -> int:
    """Returns the first token after `start` that not all paths below `start` share."""
    at, stop = start, ends[start]
    while at < stop and ends[at] == stop:
        at += 1
    return at


def _join_siblings(parts: Sequence[tuple[int, int, int]]) -> Sequence[tuple[int, int, int]]:
    """Joins neighbours with the same parent, up to the length of the longest part: padded to it,
    they are computed together for the price of one."""
    longest = max((stop - start for start, stop, _ in parts), default=0)
    joined: list[tuple[int, int, int]] = []
    for start, stop, parent in parts:
        if joined and joined[-1][2] == parent and stop - joined[-1][0] <= longest:
            start = joined.pop()[0]
        joined.append((start, stop, parent))
    return joined


def _build_runs(parts: Sequence[tuple[int, int, int]]) -> _TokenRuns:
    starts, stops, parents = torch.tensor(parts or [(0, 1, 0)]).T.contiguous()
    return _TokenRuns(starts, stops - starts, parents)
