"""Prefix sharing: packs the rows of a tree so that every shared token is computed once.

The rows of a tree form a trie of tokens. Its nodes, in depth-first order, become one packed row; a
node's position is its depth, and it attends only to its ancestors and itself. Loss and gradient
equal those of the plain rows up to rounding.

Branches are continuations of rows that were not sampled, such as every value that a confidence
could have. They are paths of the same trie, without their last token, whose own output nobody
reads: branches of one token add no node at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Branches",
    "PackedBatch",
    "PackedBranches",
    "PackedTree",
    "TreePacker",
    "collate_trees",
    "copy_to",
    "pack_trees",
]


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device; the host does not wait for a GPU, which reads from memory
    that is pinned until then."""
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False, slots=True)
class Branches:
    """`R` continuations of rows.

    Attributes:
        rows: `[R]` int64 the row that each leaves.
        starts: `[R]` int64 position of its first token in that row, at least 1.
        tokens: its tokens, `R` times.
    """

    rows: Tensor
    starts: Tensor
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False, slots=True)
class PackedBranches:
    """The branches of a packed tree or of a micro-batch: `U` states, each followed by some tokens.

    Attributes:
        at: `[U]` the node whose output predicts what follows.
        rows: `[U]` the row that was left.
        starts: `[U]` where it was left.
        states: `[K]` for every token of every branch, the state that it follows.
        tokens: `[K]` the token.
        numbers: `[K]` the branch's number in `Branches`.

    Rows, starts and numbers stay on the CPU, as do the tensors that they index.
    """

    at: Tensor
    rows: Tensor
    starts: Tensor
    states: Tensor
    tokens: Tensor
    numbers: Tensor

    def to(self, device: torch.device) -> "PackedBranches":
        """Returns the branches on another device."""
        moving = ("at", "states", "tokens")
        return replace(self, **{name: copy_to(getattr(self, name), device) for name in moving})

    def gather_starts(self, tensor: Tensor) -> Tensor:
        """Returns the `[U]` values of a CPU tensor, `[B, T]`, where rows were left, on this
        device."""
        return copy_to(tensor[self.rows, self.starts], self.states.device)


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
        branches: the branches that leave the rows.
    """

    token_ids: Tensor
    depths: Tensor
    ends: Tensor
    at: Tensor
    rows: Tensor
    columns: Tensor
    branches: PackedBranches

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False, slots=True)
class PackedBatch:
    """Concatenated packed trees: one micro-batch of `L` tokens without padding.

    Attributes:
        token_ids: `[L]`.
        positions: `[L]` number of tokens before it on its path; 0 at the start of a tree.
        ends: `[L]` token i attends to token j exactly when j <= i < ends[j].
        sources: `[M + U]` index of the token whose output predicts each target, then the states of
            the branches.
        targets: `[M]` the predicted tokens.
        rows: `[M]` row of each target in the step's batch.
        columns: `[M]` position of each target in its row.
        branches: the branches that leave the rows.

    Rows and columns stay on the CPU, as do the tensors that they index.
    """

    token_ids: Tensor
    positions: Tensor
    ends: Tensor
    sources: Tensor
    targets: Tensor
    rows: Tensor
    columns: Tensor
    branches: PackedBranches

    def __len__(self) -> int:
        return len(self.token_ids)

    def gather_targets(self, tensor: Tensor) -> Tensor:
        """Returns the `[M]` values of a CPU tensor, `[B, T]`, at the targets, on this batch's
        device."""
        return copy_to(tensor[self.rows, self.columns], self.targets.device)

    def to(self, device: torch.device) -> "PackedBatch":
        """Returns the micro-batch on another device."""
        if device == self.token_ids.device:
            return self
        moving = ("token_ids", "positions", "ends", "sources", "targets")
        moved = {name: copy_to(getattr(self, name), device) for name in moving}
        return replace(self, branches=self.branches.to(device), **moved)


class TreePacker:
    """Packs the rows that have wanted tokens, and the branches, tree by tree.

    Args:
        token_ids: `[B, T]` int64.
        is_token: `[B, T]` bool, a prefix of each row.
        tree_ids: `[B]` int64, only rows with equal ids can share tokens.
        want: `[B, T]` bool, tokens whose log-probability is needed; never the first of a row.
        limit: a packed tree longer than this is split between rows; results do not change, since
            the shared prefix is then computed once in each part.
        branches: continuations whose tokens are all wanted.
        merge: False disables sharing: every row is its own tree, and so is a branch, unless its
            path begins another one's.

    Attributes:
        numbers: ids of the trees that have anything to pack, in order.
    """

    def __init__(
        self,
        token_ids: Tensor,
        is_token: Tensor,
        tree_ids: Tensor,
        want: Tensor,
        limit: int,
        *,
        branches: Branches | None = None,
        merge: bool = True,
    ) -> None:
        self._token_ids, self._is_token, self._want = token_ids, is_token, want
        self._limit, self._branches, self._merge = limit, branches, merge
        self._rows_of, self._branches_of = dict[int, list[int]](), dict[int, list[int]]()
        for b in want.any(dim=1).nonzero()[:, 0].tolist():
            self._rows_of.setdefault(int(tree_ids[b]), []).append(b)
        if branches is not None:
            for number, b in enumerate(branches.rows.tolist()):
                self._branches_of.setdefault(int(tree_ids[b]), []).append(number)
        self.numbers = sorted({*self._rows_of, *self._branches_of})

    def pack(self, tree: int) -> list[PackedTree]:
        """Packs one tree; as Python numbers, its rows are large."""
        rows, branches = self._rows_of.get(tree, ()), self._branches_of.get(tree, ())
        paths = sorted([*map(self._read_row, rows), *map(self._read_branch, branches)])
        groups = _split_paths(paths, self._limit) if self._merge else _split_chains(paths)
        return [_build_packed_tree(group) for group in groups]

    def _read_row(self, b: int) -> "_Path":
        columns = self._want[b].nonzero()[:, 0].tolist()
        return _Path(tuple(self._token_ids[b, self._is_token[b]].tolist()), b, columns)

    def _read_branch(self, number: int) -> "_Path":
        assert self._branches is not None
        b, start = int(self._branches.rows[number]), int(self._branches.starts[number])
        branch = self._branches.tokens[number]
        shown = (*self._token_ids[b, :start].tolist(), *branch[:-1])
        return _Path(shown, b, list(range(start, start + len(branch))), number, branch)


def pack_trees(
    token_ids: Tensor,
    is_token: Tensor,
    tree_ids: Tensor,
    want: Tensor,
    limit: int,
    *,
    branches: Branches | None = None,
    merge: bool = True,
) -> list[PackedTree]:
    """Packs all trees, in order of tree id. See `TreePacker`."""
    packer = TreePacker(token_ids, is_token, tree_ids, want, limit, branches=branches, merge=merge)
    return [packed for tree in packer.numbers for packed in packer.pack(tree)]


class _Path(NamedTuple):
    """What the model reads for a row or a branch, and the columns that are wanted.

    Attributes:
        tokens: what it reads.
        row: the row, or the one that the branch leaves.
        columns: wanted positions.
        number: number of the branch; -1 for a row.
        branch: all tokens of the branch.
    """

    tokens: tuple[int, ...]
    row: int
    columns: list[int]
    number: int = -1
    branch: tuple[int, ...] = ()


def _split_chains(paths: Sequence[_Path]) -> Iterator[Sequence[_Path]]:
    """Splits sorted paths into runs of which each path begins the next, with one row at most."""
    part: list[_Path] = []
    for path in paths:
        fits = not part or path.tokens[: len(part[-1].tokens)] == part[-1].tokens
        if not fits or (path.number < 0 and any(other.number < 0 for other in part)):
            yield part
            part = []
        part.append(path)
    if part:
        yield part


def _split_paths(paths: Sequence[_Path], limit: int) -> Iterator[Sequence[_Path]]:
    """Splits lexicographically sorted paths into runs whose trie has at most `limit` nodes."""
    part: list[_Path] = []
    nodes = 0
    for path in paths:
        length = len(path.tokens)
        new = length - (_count_common_prefix(part[-1].tokens, path.tokens) if part else 0)
        if part and nodes + new > limit:
            yield part
            part, nodes, new = [], 0, length
        part.append(path)
        nodes += new
    yield part


def _count_common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Returns the length of the longest common prefix.

    It is bisected, because comparing slices is far faster than comparing tokens one by one.
    """
    known, most = 0, min(len(a), len(b))
    while known < most:
        middle = (known + most + 1) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known


def _build_packed_tree(paths: Sequence[_Path]) -> PackedTree:
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    at, rows, columns = [], [], []
    states: dict[tuple[int, int, int], int] = {}
    edges: list[tuple[int, int, int]] = []
    nodes: list[int] = []
    previous: tuple[int, ...] = ()
    for path, row, wanted, number, branch in paths:
        shared = _count_common_prefix(previous, path)
        for closed in nodes[shared:]:
            ends[closed] = len(tokens)
        first = len(tokens)
        nodes = nodes[:shared] + list(range(first, first + len(path) - shared))
        tokens += path[shared:]
        depths += range(shared, len(path))
        ends += [0] * (len(path) - shared)
        if number < 0:
            at += [nodes[t - 1] for t in wanted]
            rows += [row] * len(wanted)
            columns += wanted
        else:
            left = [(nodes[t - 1], row, wanted[0]) for t in wanted]
            slots = [states.setdefault(state, len(states)) for state in left]
            edges += zip(slots, branch, [number] * len(branch), strict=True)
        previous = path
    for closed in nodes:
        ends[closed] = len(tokens)
    return PackedTree(
        token_ids=_to_indices(tokens),
        depths=_to_indices(depths),
        ends=_to_indices(ends),
        at=_to_indices(at),
        rows=_to_indices(rows),
        columns=_to_indices(columns),
        branches=PackedBranches(
            *_to_indices(list(states)).view(-1, 3).T, *_to_indices(edges).view(-1, 3).T
        ),
    )


def _to_indices(values: Sequence[int] | Sequence[tuple[int, int, int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def collate_trees(trees: Sequence[PackedTree], token_ids: Tensor) -> PackedBatch:
    """Concatenates packed trees.

    Args:
        trees: one micro-batch; an empty one becomes a single token without targets.
        token_ids: `[B, T]` of the step's batch.
    """
    trees = trees or [_FILLER]
    starts = [sum(map(len, trees[:n])) for n in range(len(trees))]
    branches = _collate_branches([tree.branches for tree in trees], starts)
    at = [tree.at + start for tree, start in zip(trees, starts, strict=True)]
    rows = torch.cat([tree.rows for tree in trees])
    columns = torch.cat([tree.columns for tree in trees])
    return PackedBatch(
        token_ids=torch.cat([tree.token_ids for tree in trees]),
        positions=torch.cat([tree.depths for tree in trees]),
        ends=torch.cat([tree.ends + start for tree, start in zip(trees, starts, strict=True)]),
        sources=torch.cat([*at, branches.at]),
        targets=token_ids[rows, columns],
        rows=rows,
        columns=columns,
        branches=branches,
    )


def _collate_branches(parts: Sequence[PackedBranches], starts: Sequence[int]) -> PackedBranches:
    """Concatenates branches; `starts` are the first tokens of their trees."""
    earlier = [sum(len(part.at) for part in parts[:n]) for n in range(len(parts))]
    return PackedBranches(
        at=torch.cat([part.at + start for part, start in zip(parts, starts, strict=True)]),
        rows=torch.cat([part.rows for part in parts]),
        starts=torch.cat([part.starts for part in parts]),
        states=torch.cat([p.states + before for p, before in zip(parts, earlier, strict=True)]),
        tokens=torch.cat([part.tokens for part in parts]),
        numbers=torch.cat([part.numbers for part in parts]),
    )


_NOTHING = torch.zeros(0, dtype=torch.int64)
_FILLER = PackedTree(
    token_ids=torch.zeros(1, dtype=torch.int64),
    depths=torch.zeros(1, dtype=torch.int64),
    ends=torch.ones(1, dtype=torch.int64),
    at=_NOTHING,
    rows=_NOTHING,
    columns=_NOTHING,
    branches=PackedBranches(*[_NOTHING] * 6),
)
