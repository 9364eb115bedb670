"""Prefix sharing: packs the rows of a tree so that every shared token is computed once.

The rows of a tree form a trie of tokens. Its nodes, in depth-first order, become one packed row; a
node's position is its depth, and it attends only to its ancestors and itself. Loss and gradient
equal those of the plain rows up to rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PackedBatch", "PackedTree", "collate_trees", "distribute_trees", "pack_trees"]


@dataclass(frozen=True, eq=False, slots=True)
class PackedTree:
    """Rows of one tree as the nodes of their trie.

    Attributes:
        token_ids: `[L]` one per node, parents before children.
        depths: `[L]` number of tokens before the node on its path.
        ends: `[L]` node j is i or an ancestor of i exactly when j <= i < ends[j].
        at: `[M]` for every wanted (row, position), the node whose output predicts the token.
        rows: `[M]` the token's row in the step's batch.
        columns: `[M]` the token's position in that row.
    """

    token_ids: Tensor
    depths: Tensor
    ends: Tensor
    at: Tensor
    rows: Tensor
    columns: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False, slots=True)
class PackedBatch:
    """Concatenated packed trees: one micro-batch of `L` tokens without padding.

    Attributes:
        token_ids: `[L]`.
        positions: `[L]` number of tokens before it on its path; 0 at the start of a tree.
        ends: `[L]` token i attends to token j exactly when j <= i < ends[j].
        sources: `[M]` index of the token whose output predicts each target.
        targets: `[M]` the predicted tokens.
        rows: `[M]` row of each target in the step's batch.
        columns: `[M]` position of each target in its row.
    """

    token_ids: Tensor
    positions: Tensor
    ends: Tensor
    sources: Tensor
    targets: Tensor
    rows: Tensor
    columns: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    def gather_targets(self, tensor: Tensor) -> Tensor:
        """Returns the `[M]` values of a `[B, T]` tensor at the targets, on this batch's device."""
        return tensor[self.rows.cpu(), self.columns.cpu()].to(self.rows.device)

    def to(self, device: torch.device) -> "PackedBatch":
        """Returns the micro-batch on another device."""
        if device == self.rows.device:
            return self
        return PackedBatch(**{name: getattr(self, name).to(device) for name in self.__slots__})


def pack_trees(
    token_ids: Tensor,
    is_token: Tensor,
    tree_ids: Tensor,
    want: Tensor,
    limit: int,
    *,
    merge: bool = True,
) -> list[PackedTree]:
    """Packs the rows that have wanted tokens.

    Args:
        token_ids: `[B, T]` int64.
        is_token: `[B, T]` bool, a prefix of each row.
        tree_ids: `[B]` int64, only rows with equal ids can share tokens.
        want: `[B, T]` bool, tokens whose log-probability is needed; never the first of a row.
        limit: a packed tree longer than this is split between rows; results do not change, since
            the shared prefix is then computed once in each part.
        merge: False disables sharing: every row is its own tree.

    Returns:
        Packed trees, in order of tree id.
    """
    chosen = want.any(dim=1)
    packed = []
    for tree in tree_ids[chosen].unique().tolist():
        members = ((tree_ids == tree) & chosen).nonzero()[:, 0].tolist()
        paths = sorted((tuple(token_ids[b, is_token[b]].tolist()), b) for b in members)
        groups = _split_paths(paths, limit) if merge else ([path] for path in paths)
        packed += [_build_packed_tree(group, want) for group in groups]
    return packed


def _split_paths(
    paths: Sequence[tuple[tuple[int, ...], int]], limit: int
) -> Iterator[Sequence[tuple[tuple[int, ...], int]]]:
    """Splits lexicographically sorted paths into runs whose trie has at most `limit` nodes."""
    part: list[tuple[tuple[int, ...], int]] = []
    nodes = 0
    for path, row in paths:
        new = len(path) - (_count_common_prefix(part[-1][0], path) if part else 0)
        if part and nodes + new > limit:
            yield part
            part, nodes, new = [], 0, len(path)
        part.append((path, row))
        nodes += new
    yield part


def _count_common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _build_packed_tree(paths: Sequence[tuple[tuple[int, ...], int]], want: Tensor) -> PackedTree:
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    at, rows, columns = [], [], []
    nodes: list[int] = []
    previous: tuple[int, ...] = ()
    for path, row in paths:
        shared = _count_common_prefix(previous, path)
        for closed in nodes[shared:]:
            ends[closed] = len(tokens)
        first = len(tokens)
        nodes = nodes[:shared] + list(range(first, first + len(path) - shared))
        tokens += path[shared:]
        depths += range(shared, len(path))
        ends += [0] * (len(path) - shared)
        positions = want[row].nonzero()[:, 0].tolist()
        at += [nodes[t - 1] for t in positions]
        rows += [row] * len(positions)
        columns += positions
        previous = path
    for closed in nodes:
        ends[closed] = len(tokens)
    fields = (tokens, depths, ends, at, rows, columns)
    return PackedTree(*(torch.tensor(field, dtype=torch.int64) for field in fields))


def distribute_trees(
    trees: Sequence[PackedTree], ranks: int, limit: int, *, padded: bool = False
) -> list[list[list[PackedTree]]]:
    """Distributes packed trees over ranks by token count, and splits each share into micro-batches.

    Args:
        trees: the trees of the whole step.
        ranks: number of ranks.
        limit: maximum tokens per micro-batch.
        padded: count every tree of a micro-batch with the length of the longest.

    Returns:
        The micro-batches of each rank, the same number for all ranks; missing ones are empty.
    """
    shares: list[list[PackedTree]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for tree in sorted(trees, key=len, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append(tree)
        loads[lightest] += len(tree)
    dealt = [_micro_batches(share, limit, padded=padded) for share in shares]
    most = max(map(len, dealt))
    return [batches + [[] for _ in range(most - len(batches))] for batches in dealt]


def _micro_batches(
    share: Sequence[PackedTree], limit: int, *, padded: bool
) -> list[list[PackedTree]]:
    """Splits a rank's trees, longest first, into runs of at most `limit` tokens."""
    batches: list[list[PackedTree]] = []
    tokens = 0
    for tree in share:
        new = len(batches[-1][0]) if batches and padded else len(tree)
        if not batches or tokens + new > limit:
            batches.append([])
            tokens, new = 0, len(tree)
        batches[-1].append(tree)
        tokens += new
    return batches


def collate_trees(trees: Sequence[PackedTree], token_ids: Tensor) -> PackedBatch:
    """Concatenates packed trees.

    Args:
        trees: one micro-batch; an empty one becomes a single token without targets.
        token_ids: `[B, T]` of the step's batch.
    """
    trees = trees or [_FILLER]
    starts = [sum(map(len, trees[:n])) for n in range(len(trees))]
    rows = torch.cat([tree.rows for tree in trees])
    columns = torch.cat([tree.columns for tree in trees])
    return PackedBatch(
        token_ids=torch.cat([tree.token_ids for tree in trees]),
        positions=torch.cat([tree.depths for tree in trees]),
        ends=torch.cat([tree.ends + start for tree, start in zip(trees, starts, strict=True)]),
        sources=torch.cat([tree.at + start for tree, start in zip(trees, starts, strict=True)]),
        targets=token_ids[rows, columns],
        rows=rows,
        columns=columns,
    )


_NOTHING = torch.zeros(0, dtype=torch.int64)
_FILLER = PackedTree(
    token_ids=torch.zeros(1, dtype=torch.int64),
    depths=torch.zeros(1, dtype=torch.int64),
    ends=torch.ones(1, dtype=torch.int64),
    at=_NOTHING,
    rows=_NOTHING,
    columns=_NOTHING,
)
