"""Ways (forms) to run the model on packed trees. All compute the same outputs; `choose_form` picks
the fastest that works.

A form turns a micro-batch into calls of the model. The number of calls must not depend on the
micro-batch, since under ZeRO stage 3 every call gathers weights from all ranks.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import pad
from transformers import DynamicCache

from rlx.learner.attention import PACKED, AttentionBlocks
from rlx.learner.pack import PackedBatch

__all__ = [
    "CachedForm",
    "FlexForm",
    "ForwardForm",
    "GroupedForm",
    "OutputReader",
    "PlainForm",
]

RECOMPILATIONS = 64
"""Kinds of inputs for which flex attention may be compiled; some six are expected."""


class OutputReader(Protocol):
    """Calls a model and returns selected outputs."""

    def __call__(self, at: Tensor, **arguments: Any) -> Tensor:
        """Returns `[M, W]` outputs at the indices `at` `[M]` of the flattened `[N · L]` input.

        In place of an `attention_mask` it takes `visible`, `queries` and `keys`, as
        `rlx.model.build_attention_mask`.
        """
        ...


class ForwardForm(Protocol):
    """A way to compute packed trees.

    Attributes:
        name: name in the run's record.
        merges: whether shared prefixes are computed once; otherwise every row is its own tree.
        attention: transformers' name of the attention; None for the model's default.
    """

    name: ClassVar[str]
    merges: ClassVar[bool]
    attention: ClassVar[str | None]

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """Returns the model's `[M, W]` outputs at the sources."""
        ...


class GroupedForm:
    """Scaled-dot-product attention of blocks of tokens to their own paths."""

    name: ClassVar[str] = "grouped attention"
    merges: ClassVar[bool] = True
    attention: ClassVar[str | None] = PACKED

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """See `ForwardForm`."""
        return read(
            packed.sources,
            input_ids=packed.token_ids[None],
            position_ids=packed.positions[None],
            # Ignored, but without it transformers would build a mask of L x L.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.ends.device),
            use_cache=False,
            rlx_layout=AttentionBlocks.from_positions(packed.positions, packed.ends),
        )


@cache
def _expect_recompilations() -> None:
    """After too many shapes, flex attention would silently compute all scores of a micro-batch."""
    import torch._dynamo.config as compilation  # takes a second, and only a GPU needs it

    compilation.recompile_limit = RECOMPILATIONS


class FlexForm:
    """Block-sparse flex attention; torch has no CPU backward pass for it."""

    name: ClassVar[str] = "flex attention"
    merges: ClassVar[bool] = True
    attention: ClassVar[str | None] = "flex_attention"
    _TILE: ClassVar[int] = 128

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """See `ForwardForm`."""
        _expect_recompilations()
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
    """Reads the trunk that all rows of a tree share first, then continues its KV cache with the
    branches; gradients flow through the cache.

    Works with the model's own attention, and also computes prefixes shared between branches once.
    """

    name: ClassVar[str] = "a cache with gradient"
    merges: ClassVar[bool] = True
    attention: ClassVar[str | None] = None

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """See `ForwardForm`."""
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
        columns = torch.arange(seen.shape[-1], device=device).expand(len(ids), -1)
        below = read(
            branches.locate_tokens(packed.sources[~in_trunk]),
            input_ids=ids,
            position_ids=positions,
            visible=torch.cat([seen, own], dim=-1),
            queries=positions,
            keys=torch.cat([columns, positions], dim=1),
            past_key_values=cache,
            use_cache=True,
        )
        order = torch.cat([in_trunk.nonzero()[:, 0], (~in_trunk).nonzero()[:, 0]])
        return torch.cat([above, below]).index_select(0, order.argsort())


class PlainForm:
    """Computes every row separately, without sharing: the reference for the other forms."""

    name: ClassVar[str] = "plain rows"
    merges: ClassVar[bool] = False
    attention: ClassVar[str | None] = None

    def __call__(self, read: OutputReader, packed: PackedBatch) -> Tensor:
        """See `ForwardForm`."""
        rows = _find_tree_runs(packed)
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
        parents: `[N]`, the trunk that each branch continues.
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


def _find_tree_runs(packed: PackedBatch) -> _TokenRuns:
    """Returns the trees of a micro-batch as runs."""
    starts = (packed.positions == 0).nonzero()[:, 0].cpu()
    lengths = torch.cat([starts[1:], torch.tensor([len(packed)])]) - starts
    return _TokenRuns(starts, lengths, torch.arange(len(starts)))


def _split_trunk_branches(packed: PackedBatch) -> tuple[_TokenRuns, _TokenRuns]:
    """Returns the trunk of every tree, which all of its rows share, and the branches from it.

    If there are no branches at all, the first token serves as a dummy branch.
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
