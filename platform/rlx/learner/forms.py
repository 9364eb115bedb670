"""Ways to compute what packed trees predict. All give the same numbers; `choose` finds the best.

A form turns a micro-batch into calls of the model: as many on every rank, whatever is in it, since
under ZeRO stage 3 every call gathers weights from all ranks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import pad
from transformers import DynamicCache

from rlx.learner.attention import GROUPED, AttentionBlocks
from rlx.learner.pack import PackedBatch

__all__ = ["CachedForm", "FlexForm", "ForwardForm", "GroupedForm", "OutputReader", "PlainForm"]


class OutputReader(Protocol):
    """Calls a model, and reads its output."""

    def __call__(self, at: Tensor, **arguments: Any) -> Tensor:
        """`[M, W]` its output at the places `at` `[M]` of the flattened `[N · L]` input."""
        ...


class ForwardForm(Protocol):
    """A way to compute packed trees.

    Attributes:
        name: as recorded.
        merges: whether it computes shared prefixes once; else every row is a tree of its own.
        attention: by transformers' name; None is the model's own.
    """

    name: ClassVar[str]
    merges: ClassVar[bool]
    attention: ClassVar[str | None]

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """`[M, W]` the model's output at the sources."""
        ...


class GroupedForm:
    """Blocks of tokens against their own paths, by scaled-dot-product attention."""

    name: ClassVar[str] = "grouped attention"
    merges: ClassVar[bool] = True
    attention: ClassVar[str | None] = GROUPED

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """See `Form`."""
        return read(
            packed.sources,
            input_ids=packed.token_ids[None],
            position_ids=packed.positions[None],
            # Not looked at, but without it transformers would make one of L x L.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.ends.device),
            use_cache=False,
            rlx_blocks=AttentionBlocks.from_positions(packed.positions, packed.ends),
        )


class FlexForm:
    """Block-sparse flex attention; torch has no backward of it on CPU."""

    name: ClassVar[str] = "flex attention"
    merges: ClassVar[bool] = True
    attention: ClassVar[str | None] = "flex_attention"
    _TILE: ClassVar[int] = 128

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """See `Form`."""
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


class CachedForm:
    """What all rows of a tree share is read first, with its gradient; branches continue its cache.

    Needs no attention of its own, and computes what branches share among themselves once as well.
    """

    name: ClassVar[str] = "a cache with gradient"
    merges: ClassVar[bool] = True
    attention: ClassVar[str | None] = None

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """See `Form`."""
        trunks, branches = _split_trunk_branches(packed)
        device, in_trunk = packed.ends.device, trunks.contains_tokens(packed.sources)
        cache = DynamicCache()
        ids, positions, _ = trunks.build_rectangle(packed)
        above = read(
            trunks.locate_tokens(packed.sources[in_trunk]),
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        cache.batch_select_indices(branches.parents.to(device))
        ids, positions, own = branches.build_rectangle(packed)
        length = trunks.lengths[branches.parents].to(device)
        seen = torch.arange(int(trunks.lengths.max()), device=device) < length[:, None]
        seen = seen[:, None, None, :].expand(-1, -1, own.shape[2], -1)
        kind = cache.layers[0].keys.dtype  # added to scores, which every kind of attention can do
        hidden = torch.cat([~seen, ~own], dim=-1).to(kind) * torch.finfo(kind).min
        below = read(
            branches.locate_tokens(packed.sources[~in_trunk]),
            input_ids=ids,
            position_ids=positions,
            attention_mask=hidden,
            past_key_values=cache,
            use_cache=True,
        )
        order = torch.cat([in_trunk.nonzero()[:, 0], (~in_trunk).nonzero()[:, 0]])
        return torch.cat([above, below]).index_select(0, order.argsort())


class PlainForm:
    """Every row by itself, as if nothing were shared: what the other forms are compared with."""

    name: ClassVar[str] = "plain rows"
    merges: ClassVar[bool] = False
    attention: ClassVar[str | None] = None

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """See `Form`."""
        rows = _find_tree_runs(packed)
        ids, _, _ = rows.build_rectangle(packed)
        # Padding is on the right and attention causal, so no token that counts sees it. Its
        # positions go on: transformers takes one that begins anew for another packed sequence,
        # and makes a mask of every pair of tokens.
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return read(
            rows.locate_tokens(packed.sources),
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
        )


@dataclass(frozen=True, eq=False, slots=True)
class _TokenRuns:
    """`N` runs of consecutive tokens of a micro-batch, as rows of a rectangle.

    Attributes:
        starts, lengths: `[N]`, on the CPU, in order.
        parents: `[N]` for a branch the trunk that it continues.
    """

    starts: Tensor
    lengths: Tensor
    parents: Tensor

    def contains_tokens(self, tokens: Tensor) -> Tensor:
        """`[M]` bool: whether a token is in one of the runs."""
        run = self._run(tokens)
        starts, lengths = self.starts.to(tokens.device), self.lengths.to(tokens.device)
        return (run >= 0) & (tokens < (starts + lengths)[run])

    def locate_tokens(self, tokens: Tensor) -> Tensor:
        """`[M]` where tokens of the runs stand in the flattened rectangle."""
        run, starts = self._run(tokens), self.starts.to(tokens.device)
        return run * int(self.lengths.max()) + tokens - starts[run]

    def _run(self, tokens: Tensor) -> Tensor:
        """`[M]` the last run that begins at or before a token; -1 for none."""
        return torch.searchsorted(self.starts.to(tokens.device), tokens, right=True) - 1

    def build_rectangle(self, packed: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """`[N, L]` token ids and positions, and `[N, 1, L, L]` bool: which of them sees which."""
        column = torch.arange(int(self.lengths.max()))
        token = self.starts[:, None] + column
        real = column < self.lengths[:, None]
        token = token.where(real, self.starts[:, None]).to(packed.ends.device)
        ends = packed.ends[token].where(real.to(token.device), -1)
        query, key = token[:, :, None], token[:, None, :]
        causal = (column <= column[:, None]).to(token.device)
        sees = causal & (key <= query) & (query < ends[:, None, :])
        sees |= (column == column[:, None]).to(token.device)  # padding sees itself
        return packed.token_ids[token], packed.positions[token], sees[:, None]


def _find_tree_runs(packed: PackedBatch) -> _TokenRuns:
    """The trees of a micro-batch."""
    starts = (packed.positions == 0).nonzero()[:, 0].cpu()
    lengths = torch.cat([starts[1:], torch.tensor([len(packed)])]) - starts
    return _TokenRuns(starts, lengths, torch.arange(len(starts)))


def _split_trunk_branches(packed: PackedBatch) -> tuple[_TokenRuns, _TokenRuns]:
    """The trunk of every tree, which all of its rows share, and what branches off from it.

    Where nothing branches off anywhere, the first token stands for a branch that nobody reads.
    """
    trees, ends = _find_tree_runs(packed), packed.ends.cpu()
    trunks: list[int] = []
    branches: list[tuple[int, int, int]] = []
    for tree, (start, length) in enumerate(
        zip(trees.starts.tolist(), trees.lengths.tolist(), strict=True)
    ):
        stop = start + length
        trunk = int((ends[start:stop] == stop).to(torch.int8).cumprod(dim=0).sum())
        trunks.append(trunk)
        at = start + trunk
        while at < stop:
            branches.append((at, int(ends[at]) - at, tree))
            at = int(ends[at])
    starts, lengths, parents = torch.tensor(branches or [(0, 1, 0)]).T.contiguous()
    return (
        _TokenRuns(trees.starts, torch.tensor(trunks), trees.parents),
        _TokenRuns(starts, lengths, parents),
    )
