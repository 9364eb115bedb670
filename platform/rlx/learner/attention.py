"""Attention over packed trees: blocks of tokens, each against its own path and itself.

The tokens of a tree stand in the order of a depth-first walk. What any token of a run of
consecutive ones may look at is either in the run or on the path to its first token, so a block of
b tokens at depth d costs b · (d + b), wherever the tree branches. Blocks of about equal length are
computed together.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

__all__ = ["GROUPED", "AttentionBlocks"]

GROUPED = "rlx_grouped"
"""The name under which transformers finds it."""

SMALLEST = 64
"""Tokens of a block at least."""
PATHS_PER_BLOCK = 4
"""A path is at most so many times as long as a block, which bounds what is gathered."""
AS_LONG = 0.85
"""Blocks are computed together whose keys are at least this share of the longest's."""

UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments by which a model asks for another attention than this one."""


@dataclass(frozen=True, eq=False, slots=True)
class AttentionBlocks:
    """Which tokens are computed together, for a micro-batch of `L` tokens.

    Attributes:
        queries: `[Q]` tokens, block after block, padded.
        keys: `[K]` what each block looks at, padded.
        outputs: `[L]` where a token stands among the queries.
        sizes: blocks, queries and keys of a block, for blocks that are computed together.
        masks: for each of them `[blocks, 1, queries, keys]` float32, added to scores: -inf where
            a query may not look. All layers share them; bool ones would be turned into such by
            every layer, and kept until its backward pass.
    """

    queries: Tensor
    keys: Tensor
    outputs: Tensor
    sizes: tuple[tuple[int, int, int], ...]
    masks: tuple[Tensor, ...]

    @classmethod
    def from_positions(cls, positions: Tensor, ends: Tensor) -> "AttentionBlocks":
        """Cuts a micro-batch into blocks.

        Args:
            positions, ends: `[L]` as in `PackedBatch`.
        """
        device = ends.device
        ends = ends.cpu()
        size = max(SMALLEST, (int(positions.max()) + 1) // PATHS_PER_BLOCK)
        tokens = torch.arange(len(ends)).split(size)
        seen = [torch.cat([(ends[: t[0]] > t[0]).nonzero()[:, 0], t]) for t in tokens]
        buckets: list[list[int]] = []
        for block in sorted(range(len(tokens)), key=lambda n: len(seen[n]), reverse=True):
            if not buckets or len(seen[block]) < AS_LONG * len(seen[buckets[-1][0]]):
                buckets.append([])
            buckets[-1].append(block)
        asked = [_stack_token_rows([tokens[n] for n in bucket]) for bucket in buckets]
        looked = [_stack_token_rows([seen[n] for n in bucket]) for bucket in buckets]
        queries = torch.cat([q.flatten() for q in asked])
        outputs = torch.empty_like(ends)
        real = (queries >= 0).nonzero()[:, 0]
        outputs[queries[real]] = real
        return cls(
            queries=queries.clamp(min=0).to(device),
            keys=torch.cat([k.flatten() for k in looked]).clamp(min=0).to(device),
            outputs=outputs.to(device),
            sizes=tuple((*q.shape, k.shape[1]) for q, k in zip(asked, looked, strict=True)),
            masks=tuple(
                _build_attention_mask(q, k, ends).to(device)
                for q, k in zip(asked, looked, strict=True)
            ),
        )


def _stack_token_rows(parts: list[Tensor]) -> Tensor:
    """`[n, longest]` the parts below one another, -1 on padding."""
    longest = max(map(len, parts))
    return torch.stack([pad(part, (0, longest - len(part)), value=-1) for part in parts])


def _build_attention_mask(queries: Tensor, keys: Tensor, ends: Tensor) -> Tensor:
    """`[n, 1, b, k]`; padding looks at the first key, since a softmax over nothing is NaN."""
    asks, key = queries[:, :, None], keys[:, None, :]
    sees = (key >= 0) & (key <= asks) & (asks < ends[keys.clamp(min=0)][:, None, :])
    first = torch.arange(keys.shape[1]) == 0
    seen = torch.where(asks >= 0, sees, first)[:, None]
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


def _compute_grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    rlx_blocks: AttentionBlocks | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it; `[1, heads, L, width]` in, `[1, L, heads, width]` out.

    Raises:
        ValueError: the model asks for something else than plain attention.
    """
    if rlx_blocks is None:  # the model is used for something else than packed trees
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return torch.as_tensor(output), None
    if asked := [name for name in UNKNOWN if others.get(name) is not None]:
        raise ValueError(f"this model's attention uses {', '.join(asked)}")
    blocks, (_, heads, _, width) = rlx_blocks, query.shape
    asks = _gather_tokens(query, blocks.queries)
    keys, values = _gather_tokens(key, blocks.keys), _gather_tokens(value, blocks.keys)
    lengths = [n * b for n, b, _ in blocks.sizes], [n * k for n, _, k in blocks.sizes]
    parts = zip(
        blocks.sizes,
        blocks.masks,
        asks.split(lengths[0]),
        keys.split(lengths[1]),
        values.split(lengths[1]),
        strict=True,
    )
    outputs = [
        _attend_blocks(
            q.unflatten(0, (n, b)), k.unflatten(0, (n, c)), v.unflatten(0, (n, c)), mask, scaling
        )
        for (n, b, c), mask, q, k, v in parts
    ]
    return torch.cat(outputs).index_select(0, blocks.outputs).view(1, -1, heads, width), None


def _gather_tokens(states: Tensor, tokens: Tensor) -> Tensor:
    """`[1, heads, L, width]` to `[tokens, heads, width]`, whole tokens at a time."""
    flat = states[0].transpose(0, 1).flatten(1)
    return flat.index_select(0, tokens).view(-1, states.shape[1], states.shape[3])


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """`[n, b, heads, width]` against `[n, k, heads, width]`; gives `[n · b, heads · width]`."""
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    fewer = query.shape[1] // key.shape[1]
    shares_heads = fewer > 1 and query.device.type == "cpu"  # elsewhere only without a mask
    if fewer > 1 and not shares_heads:
        key, value = repeat_kv(key, fewer), repeat_kv(value, fewer)
    output: Tensor = scaled_dot_product_attention(
        query, key, value, attn_mask=mask.to(query.dtype), scale=scaling, enable_gqa=shares_heads
    )
    return output.transpose(1, 2).reshape(query.shape[0] * query.shape[2], -1)


AttentionInterface.register(GROUPED, _compute_grouped_attention)
