"""Prefix sharing: packs the rows of a tree so that every shared token is computed once.

The rows of a tree form a trie of tokens. Its nodes, in depth-first order, become one packed row; a
node's position is its depth, and it attends only to its ancestors and itself. Loss and gradient
equal those of the plain rows up to rounding.

Branches are continuations of rows that were not sampled, such as every value that a confidence
could have. They are paths of the same trie, without their last token, whose own output nobody
reads: branches of one token add no node at all.

`RankMicroBatches` distributes the packed trees of a step over ranks and micro-batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from rlx.learner.distributed import Ranks


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
