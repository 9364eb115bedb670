"""Attention over packed trees, chain by chain, without masks.

A chain is a run of tokens without a fork. The tokens below it follow it directly, since a tree is
in depth-first order, and attend to all of it. So the attention of a tree is that of spans, in which
consecutive tokens attend to all of the tokens just before them, and of runs, the short pieces of
chains, whose tokens attend to themselves and to those before them in the run. Flash attention takes
both as they are. The results are merged by the log-sum-exp of their scores, as in ring attention
(Liu, Zaharia and Abbeel, 2023, arXiv:2310.01889).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlx.learner.flash import attend, differentiate

__all__ = ["AttentionChains", "attend_chains", "find_chains"]

RUN = 128
"""Tokens of a run. Kernels waste most of the triangle that a run's first tokens do not see."""
LAST = 32
"""Tokens by which the last run of a chain may be longer."""
AS_LONG = 0.8
"""Runs are computed together if they have at least this fraction of the longest one's tokens."""


def find_chains(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `[C]` and `[C]`: where each chain stops, and where the last token below it does.

    A token is the only child of the one before it exactly when both have the same end.

    Args:
        ends: `[L]` as in `PackedBatch`.
    """
    last, lengths = ends.unique_consecutive(return_counts=True)
    return lengths.cumsum(0), last


@dataclass(frozen=True, eq=False, slots=True)
class AttentionChains:
    """Partition of a micro-batch of `L` tokens into runs, and the spans between them.

    Attributes:
        runs: for each group of runs that are computed together, `[runs, tokens]`; shorter ones
            repeat their last token.
        real: for each group, `[runs, 1, tokens, 1]` bool: not repeated; None if none is.
        places: `[L]` index of each token among those of all runs.
        spans: (start, middle, stop): tokens from middle to stop attend to all from start to middle.
        length: tokens of the longest row.
    """

    runs: tuple[Tensor, ...]
    real: tuple[Tensor | None, ...]
    places: Tensor
    spans: tuple[tuple[int, int, int], ...]
    length: int

    @classmethod
    def from_positions(cls, positions: Tensor, ends: Tensor) -> "AttentionChains":
        """Partitions a micro-batch.

        Args:
            positions, ends: `[L]` as in `PackedBatch`.
        """
        device, length = ends.device, int(positions.max()) + 1
        ends = ends.cpu()
        cuts: list[tuple[int, int]] = []
        spans: list[tuple[int, int, int]] = []
        start = 0
        for stop, last in zip(*(found.tolist() for found in find_chains(ends)), strict=True):
            if last > stop:
                spans.append((start, stop, last))
            middles = list(_cut_chain(start, stop))
            spans += middles
            borders = sorted(middle for _, middle, _ in middles)
            cuts += zip([start, *borders], [*borders, stop], strict=True)
            start = stop
        groups = [_stack_runs(group) for group in _group_runs(cuts)]
        real = torch.cat([real.flatten() for _, real in groups])
        places = torch.empty_like(ends)
        at = real.nonzero()[:, 0]
        places[torch.cat([tokens.flatten() for tokens, _ in groups])[at]] = at
        return cls(
            runs=tuple(tokens.to(device) for tokens, _ in groups),
            real=tuple(
                None if real.all() else real[:, None, :, None].to(device) for _, real in groups
            ),
            places=places.to(device),
            spans=tuple(spans),
            length=length,
        )


def _cut_chain(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields the spans that cut a chain into runs of `RUN` tokens, but for the last.

    Each cuts what is left about in half, since large spans are the fastest.
    """
    if stop - start > RUN + LAST:
        runs = (stop - start - LAST - 1) // RUN
        middle = start + RUN * (1 << runs.bit_length() - 1)
        yield start, middle, stop
        yield from _cut_chain(start, middle)
        yield from _cut_chain(middle, stop)


def _group_runs(cuts: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Groups runs (start, stop) of similar lengths, longest first."""
    groups: list[list[tuple[int, int]]] = []
    longest = 0
    for start, stop in sorted(cuts, key=lambda run: run[0] - run[1]):
        if not groups or stop - start < AS_LONG * longest:
            groups.append([])
            longest = stop - start
        groups[-1].append((start, stop))
    return groups


def _stack_runs(group: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Returns the tokens of runs, `[runs, longest]`, and whether each is not a repetition."""
    starts, stops = torch.tensor(group).T[..., None]
    tokens = starts + torch.arange(int((stops - starts).max()))
    return tokens.minimum(stops - 1), tokens < stops


def attend_chains(
    query: Tensor, key: Tensor, value: Tensor, chains: AttentionChains, scale: float | None
) -> Tensor:
    """Attention of every token to its path and itself.

    Args:
        query: `[1, heads, L, width]`.
        key, value: `[1, kv_heads, L, width]`.
        scale: factor of the scores; None for 1/√width.

    Returns:
        `[1, L, heads, width]`.
    """
    return _ChainAttention.apply(query, key, value, chains, scale)  # type: ignore


class _ChainAttention(torch.autograd.Function):
    """Keeps its inputs, its output and a log-sum-exp for every token and head; no mask or copy."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chains: AttentionChains,
        scale: float | None,
    ) -> Tensor:
        by_token = [states[0].transpose(0, 1) for states in (query, key, value)]
        found = [
            attend(*(_take_runs(x, tokens) for x in by_token), causal=True, scale=scale)
            for tokens in chains.runs
        ]
        exact = found[0][1].dtype
        output = _join_runs([out for out, _ in found], chains).to(exact)
        total = _join_runs([logsumexp for _, logsumexp in found], chains)
        for start, middle, stop in chains.spans:
            q, k, v = query[:, :, middle:stop], key[:, :, start:middle], value[:, :, start:middle]
            out, logsumexp = attend(q, k, v, causal=False, scale=scale)
            own, other = total[middle:stop], logsumexp[0].transpose(0, 1)
            both = torch.logaddexp(own, other)
            output[middle:stop].mul_((own - both).exp_()[..., None]).addcmul_(
                out[0].transpose(0, 1), (other - both).exp_()[..., None]
            )
            total[middle:stop] = both
        output = output.to(query.dtype)[None]
        ctx.save_for_backward(query, key, value, output, total)
        ctx.chains, ctx.scale = chains, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        chains, scale = ctx.chains, ctx.scale
        gradient = gradient.contiguous()
        by_token = [gradient[0], *(x[0].transpose(0, 1) for x in (query, key, value))]
        by_token += [output[0], total]
        found = []
        for tokens, real in zip(chains.runs, chains.real, strict=True):
            outer, *inner = (_take_runs(x, tokens) for x in by_token)
            outer = outer if real is None else outer * real
            found.append(differentiate(outer, *inner, causal=True, scale=scale))
        gradients = [_join_runs(parts, chains) for parts in zip(*found, strict=True)]
        gradients = [part.to(total.dtype) for part in gradients]
        outer, output = gradient.transpose(1, 2), output.transpose(1, 2)
        total = total.transpose(0, 1)[None]
        for start, middle, stop in chains.spans:
            parts = differentiate(
                *(outer[:, :, middle:stop], query[:, :, middle:stop]),
                *(key[:, :, start:middle], value[:, :, start:middle]),
                *(output[:, :, middle:stop], total[:, :, middle:stop]),
                causal=False,
                scale=scale,
            )
            ranges = slice(middle, stop), slice(start, middle), slice(start, middle)
            for whole, tokens, part in zip(gradients, ranges, parts, strict=True):
                whole[tokens] += part[0].transpose(0, 1)
        return *(x.to(query.dtype).transpose(0, 1)[None] for x in gradients), None, None


def _take_runs(states: Tensor, tokens: Tensor) -> Tensor:
    """Gathers `[runs, heads, tokens, ...]` of `[L, heads, ...]`."""
    taken = states.index_select(0, tokens.flatten())
    return taken.view(*tokens.shape, *states.shape[1:]).transpose(1, 2)


def _join_runs(parts: Sequence[Tensor], chains: AttentionChains) -> Tensor:
    """Turns `[runs, heads, tokens, ...]` of every group into `[L, heads, ...]`."""
    by_run = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in parts])
    return torch.as_tensor(by_run.index_select(0, chains.places))
