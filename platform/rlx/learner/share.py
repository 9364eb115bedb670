"""One rank's share of a step's tokens, in micro-batches."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from rlx.learner.distributed import Ranks
from rlx.learner.pack import Branches, PackedBatch, collate_trees, distribute_trees, pack_trees

__all__ = ["RankMicroBatches", "TokenRows"]


class TokenRows(Protocol):
    """Rows of tokens, as in `rlx.batch.TokenBatch`."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def is_token(self) -> Tensor: ...
    @property
    def tree_ids(self) -> Tensor: ...


class RankMicroBatches:
    """One rank's share of the wanted tokens; every rank has the same number of micro-batches.

    Rows are never split: all wanted tokens of a row are targets of the same micro-batch.

    Args:
        batch: all rows of the step, the same on every rank.
        want: `[B, T]` bool, tokens to compute; never the first of a row.
        limit: packed tokens per micro-batch.
        ranks: the ranks that trees are distributed over.
        merge: whether rows of a tree share prefixes; if not, padding counts as tokens.
        branches: continuations of rows whose tokens are wanted as well.

    Attributes:
        computed_tokens: packed tokens of all ranks, without padding; 0 if nothing is wanted.
        row_tokens: tokens of the rows they represent.
    """

    def __init__(
        self,
        batch: TokenRows,
        want: Tensor,
        limit: int,
        ranks: Ranks,
        *,
        merge: bool,
        branches: Branches | None = None,
    ) -> None:
        self._batch = batch
        self._ranks = ranks
        trees = pack_trees(
            batch.token_ids,
            batch.is_token,
            batch.tree_ids,
            want,
            limit,
            branches=branches,
            merge=merge,
        )
        shares = (
            distribute_trees(trees, ranks.count, limit, padded=not merge)
            if trees
            else [[]] * ranks.count
        )
        self._mine = shares[ranks.rank]
        self.computed_tokens = sum(map(len, trees))
        represented = want.any(dim=1)
        if branches is not None:
            represented = represented.index_fill(0, branches.rows, True)
        self.row_tokens = int(batch.is_token[represented].sum())

    def __len__(self) -> int:
        """Number of micro-batches, the same for every rank; 0 if nothing is wanted."""
        return len(self._mine)

    def __iter__(self) -> Iterator[PackedBatch]:
        """Yields the micro-batches, on the rank's device; missing ones have no targets."""
        for trees in self._mine:
            yield collate_trees(trees, self._batch.token_ids).to(self._ranks.device)

    @torch.no_grad()
    def gather_token_values(self, ask: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Computes a value for every wanted token on all ranks, and gathers them on every rank.

        Args:
            ask: returns `[M]` values for the `M` targets of a micro-batch; called equally often on
                every rank.

        Returns:
            `[B, T]` float32 on the CPU, 0 where nothing is wanted.
        """
        result = torch.zeros(self._batch.token_ids.shape)
        for packed in self:
            result[packed.rows.cpu(), packed.columns.cpu()] = ask(packed).float().cpu()
        return self._ranks.sum_tensors(result)  # a token is computed on one rank only
