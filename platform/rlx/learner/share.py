"""One rank's share of a step's tokens, in micro-batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rlx.learner.distributed import Ranks
from rlx.learner.pack import Branches, PackedBatch, PackedTree, TreePacker, collate_trees

__all__ = ["RankMicroBatches", "TokenRows", "distribute_trees"]

SizedT = TypeVar("SizedT", bound=Sized)


@dataclass(frozen=True, slots=True)
class _TreePart:
    """A packed tree of some rank: a tree's id, which of its parts, and the number of tokens."""

    tree: int
    part: int
    tokens: int

    def __len__(self) -> int:
        return self.tokens


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

    Rows are never split: all wanted tokens of a row are targets of the same micro-batch. Every rank
    packs some trees and tells the others their lengths, by which all distribute them alike; then it
    packs what it lacks of its share. Every rank makes one, at the same time.

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
        packer = TreePacker(
            *(batch.token_ids, batch.is_token, batch.tree_ids, want, limit),
            branches=branches,
            merge=merge,
        )
        packed = {tree: packer.pack(tree) for tree in packer.numbers[ranks.rank :: ranks.count]}
        parts = _gather_parts(packer.numbers, packed, ranks)
        shares = distribute_trees(parts, ranks.count, limit, padded=not merge) if parts else []
        mine = shares[ranks.rank] if shares else []
        lacking = {part.tree for together in mine for part in together} - packed.keys()
        packed |= {tree: packer.pack(tree) for tree in lacking}
        self._mine = [[packed[part.tree][part.part] for part in together] for together in mine]
        self.computed_tokens = sum(map(len, parts))
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
            result[packed.rows, packed.columns] = ask(packed).float().cpu()
        return self._ranks.sum_tensors(result)  # a token is computed on one rank only


def _gather_parts(
    numbers: Sequence[int], packed: Mapping[int, Sequence[PackedTree]], ranks: Ranks
) -> list[_TreePart]:
    """The packed trees of all ranks, in order of tree id.

    Args:
        numbers: ids of all trees, in order.
        packed: this rank's packed trees, by tree id.
    """
    told = ranks.gather({tree: [len(part) for part in parts] for tree, parts in packed.items()})
    lengths = {tree: counts for one in told for tree, counts in one.items()}
    return [_TreePart(tree, n, count) for tree in numbers for n, count in enumerate(lengths[tree])]


def distribute_trees(
    trees: Sequence[SizedT], ranks: int, limit: int, *, padded: bool = False
) -> list[list[list[SizedT]]]:
    """Distributes packed trees over ranks by token count, and splits each share into micro-batches.

    Args:
        trees: the trees of the whole step, or what stands for them, with their lengths.
        ranks: number of ranks.
        limit: maximum tokens per micro-batch.
        padded: count every tree of a micro-batch with the length of the longest.

    Returns:
        The micro-batches of each rank, the same number for all ranks; missing ones are empty.
    """
    shares: list[list[SizedT]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for tree in sorted(trees, key=len, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append(tree)
        loads[lightest] += len(tree)
    dealt = [_micro_batches(share, limit, padded=padded) for share in shares]
    most = max(map(len, dealt))
    return [batches + [[] for _ in range(most - len(batches))] for batches in dealt]


def _micro_batches(share: Sequence[SizedT], limit: int, *, padded: bool) -> list[list[SizedT]]:
    """Splits a rank's trees, longest first, into runs of at most `limit` tokens."""
    batches: list[list[SizedT]] = []
    tokens = 0
    for tree in share:
        new = len(batches[-1][0]) if batches and padded else len(tree)
        if not batches or tokens + new > limit:
            batches.append([])
            tokens, new = 0, len(tree)
        batches[-1].append(tree)
        tokens += new
    return batches
