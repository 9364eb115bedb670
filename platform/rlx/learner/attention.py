"""Attention over packed trees, in blocks of tokens that attend to their path and to themselves.

The tokens of a tree are in depth-first order. A token in a block of consecutive tokens can only
attend to tokens in the block or on the path to the block's first token, so a block of b tokens at
depth d costs b · (d + b), wherever the tree branches. Blocks with similar numbers of keys are
computed together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from rlx.repeatable import take_rows

__all__ = ["PACKED", "AttentionBlocks"]

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
            query must not attend. Shared by all layers; every layer would convert a bool mask to
            float and keep it until its backward pass.
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
        """Partitions a micro-batch into blocks.

        Args:
            positions, ends: `[L]` as in `PackedBatch`.
        """
        device, length = ends.device, int(positions.max()) + 1
        ends, places = ends.cpu(), positions.cpu()
        size = cls.choose_size(positions)
        tokens = torch.arange(len(ends)).split(size)
        seen = [torch.cat([(ends[: t[0]] > t[0]).nonzero()[:, 0], t]) for t in tokens]
        buckets: list[list[int]] = []
        for block in sorted(range(len(tokens)), key=lambda n: len(seen[n]), reverse=True):
            if not buckets or len(seen[block]) < AS_LONG * len(seen[buckets[-1][0]]):
                buckets.append([])
            buckets[-1].append(block)
        query_rows = [_stack_token_rows([tokens[n] for n in bucket]) for bucket in buckets]
        key_rows = [_stack_token_rows([seen[n] for n in bucket]) for bucket in buckets]
        queries = torch.cat([q.flatten() for q in query_rows])
        outputs = torch.empty_like(ends)
        real = (queries >= 0).nonzero()[:, 0]
        outputs[queries[real]] = real
        return cls(
            queries=queries.clamp(min=0).to(device),
            keys=torch.cat([k.flatten() for k in key_rows]).clamp(min=0).to(device),
            outputs=outputs.to(device),
            sizes=tuple((*q.shape, k.shape[1]) for q, k in zip(query_rows, key_rows, strict=True)),
            masks=tuple(
                _build_attention_mask(q, k, ends).to(device)
                for q, k in zip(query_rows, key_rows, strict=True)
            ),
            query_positions=tuple(places[q.clamp(min=0)].to(device) for q in query_rows),
            key_positions=tuple(places[k.clamp(min=0)].to(device) for k in key_rows),
            length=length,
        )

    @staticmethod
    def choose_size(positions: Tensor) -> int:
        """Tokens of a block, for the `[L]` positions of a micro-batch."""
        return max(SMALLEST, (int(positions.max()) + 1) // PATHS_PER_BLOCK)

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
    """Returns the rows stacked to `[n, longest]`, padded with -1."""
    longest = max(map(len, rows))
    return torch.stack([pad(row, (0, longest - len(row)), value=-1) for row in rows])


def _build_attention_mask(queries: Tensor, keys: Tensor, ends: Tensor) -> Tensor:
    """Returns `[n, 1, b, k]`; padding attends to the first key, since a softmax over nothing is
    NaN."""
    query, key = queries[:, :, None], keys[:, None, :]
    visible = (key >= 0) & (key <= query) & (query < ends[keys.clamp(min=0)][:, None, :])
    first = torch.arange(keys.shape[1]) == 0
    seen = torch.where(query >= 0, visible, first)[:, None]
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


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

    Raises:
        ValueError: the model requests something other than plain attention.
    """
    if rlx_layout is None:  # the model is not called on packed trees
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return torch.as_tensor(output), None
    if unsupported := [name for name in UNKNOWN if others.get(name) is not None]:
        raise ValueError(f"this model's attention uses {', '.join(unsupported)}")
    masks = rlx_layout.select_masks(sliding_window)
    return _attend_in_blocks(query, key, value, rlx_layout, masks, scaling), None


def _attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: AttentionBlocks,
    masks: Sequence[Tensor],
    scaling: float | None,
) -> Tensor:
    """Attention of `[1, heads, L, width]`, block by block; `[1, L, heads, width]`."""
    _, heads, _, width = query.shape
    queries = _gather_tokens(query, blocks.queries)
    keys, values = _gather_tokens(key, blocks.keys), _gather_tokens(value, blocks.keys)
    lengths = [n * b for n, b, _ in blocks.sizes], [n * k for n, _, k in blocks.sizes]
    groups = zip(
        blocks.sizes,
        masks,
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
    return torch.cat(outputs).index_select(0, blocks.outputs).view(1, -1, heads, width)


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
