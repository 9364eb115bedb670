"""Prefix sharing: packs the rows of a step so that every shared token is computed once.

The rows of a micro-batch, of one tree or of many, form a trie of tokens. Its nodes, in depth-first
order, become one packed row; a node's position is its depth, and it attends only to its ancestors
and itself. Loss and gradient equal those of the plain rows up to rounding.

Branches are continuations of rows that were not sampled, such as every value that a confidence
could have. They are paths of the same trie, without their last token, whose own output nobody
reads.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.learner.distributed import Ranks


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device; the host does not wait for a GPU, which reads pinned
    memory."""
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
    """The branches of a micro-batch: `U` states, each followed by some tokens.

    Rows, starts and numbers stay on the CPU, as do the tensors that they index.

    Attributes:
        at: `[U]` the node whose output predicts what follows.
        rows: `[U]` the row that was left.
        starts: `[U]` where it was left.
        states: `[K]` for every token of every branch, the state that it follows.
        tokens: `[K]` the token.
        numbers: `[K]` the branch's number in `Branches`.
    """

    at: Tensor
    rows: Tensor
    starts: Tensor
    states: Tensor
    tokens: Tensor
    numbers: Tensor

    def to(self, device: torch.device) -> "PackedBranches":
        moving = ("at", "states", "tokens")
        return replace(self, **{name: copy_to(getattr(self, name), device) for name in moving})

    def gather_starts(self, tensor: Tensor) -> Tensor:
        """Returns the `[U]` values of a CPU tensor, `[B, T]`, where rows were left."""
        return copy_to(tensor[self.rows, self.starts], self.states.device)


@dataclass(frozen=True, eq=False, slots=True)
class PackedBatch:
    """One micro-batch: `M` wanted tokens, and the `L` nodes of the tries that they are read from.

    Rows and columns stay on the CPU, as do the tensors that they index.

    Attributes:
        token_ids: `[L]`, parents before children.
        positions: `[L]` number of tokens before it on its path; 0 where a trie begins.
        ends: `[L]` token j is token i or an ancestor of it, which i attends to, exactly when j <= i
            < ends[j].
        sources: `[M + U]` index of the token whose output predicts each target, then the states of
            the branches.
        targets: `[M]` the predicted tokens.
        rows: `[M]` row of each target in the step's batch.
        columns: `[M]` position of each target in its row.
        branches: the branches that leave the rows.
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
        """Returns the `[M]` values of a CPU tensor, `[B, T]`, at the targets."""
        return copy_to(tensor[self.rows, self.columns], self.targets.device)

    def to(self, device: torch.device) -> "PackedBatch":
        if device == self.token_ids.device:
            return self
        moving = ("token_ids", "positions", "ends", "sources", "targets")
        moved = {name: copy_to(getattr(self, name), device) for name in moving}
        return replace(self, branches=self.branches.to(device), **moved)


@dataclass(frozen=True, eq=False, slots=True)
class _Path:
    """What the model reads for a row or a branch, and the positions that are wanted.

    Attributes:
        key: the tokens it reads, as bytes in whose order paths are sorted.
        row: the row, or the one that the branch leaves.
        number: number of the branch; -1 for a row.
        columns: wanted positions.
        branch: all tokens of the branch.
        shared: tokens in common with the path before it, which are not computed again.
    """

    key: bytes
    row: int
    number: int
    columns: NDArray[np.int64]
    branch: tuple[int, ...] = ()
    shared: int = 0

    def __len__(self) -> int:
        return len(self.key) // _TOKEN.itemsize

    @property
    def tokens(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.key, _TOKEN)


_TOKEN = np.dtype(">u4")
"""Tokens in bytes that are ordered as the tokens are."""


def _read_paths(
    token_ids: Tensor, is_token: Tensor, want: Tensor, branches: Branches | None
) -> list[_Path]:
    """Returns the rows with wanted tokens, and all branches, sorted; nothing is shared yet."""
    ids, lengths = token_ids.numpy().astype(_TOKEN), is_token.sum(dim=1).tolist()
    paths = [
        _Path(ids[b, : lengths[b]].tobytes(), b, -1, want[b].nonzero()[:, 0].numpy())
        for b in want.any(dim=1).nonzero()[:, 0].tolist()
    ]

    @cache
    def read_beginning(b: int, start: int) -> bytes:
        return ids[b, :start].tobytes()

    if branches is not None:
        left = zip(branches.rows.tolist(), branches.starts.tolist(), branches.tokens, strict=True)
        for number, (b, start, branch) in enumerate(left):
            key = read_beginning(b, start) + np.array(branch[:-1], _TOKEN).tobytes()
            columns = np.arange(start, start + len(branch))
            paths.append(_Path(key, b, number, columns, branch))
    return sorted(paths, key=lambda path: (path.key, path.row, path.number))


class _Unit(NamedTuple):
    """Paths that stay together: one path or, without merging, a chain.

    Attributes:
        alone: its tokens, if it begins a micro-batch.
        added: tokens that it adds to a micro-batch which contains the unit before it.
    """

    paths: list[_Path]
    alone: int
    added: int


def _merge_paths(paths: Sequence[_Path]) -> list[_Unit]:
    """Lets every path share what it has in common with the one before it."""
    units: list[_Unit] = []
    for path in paths:
        shared = 0
        if units:
            last = units[-1].paths[0]
            shared = min(len(last), len(path))
            differs = last.tokens[:shared] != path.tokens[:shared]
            shared = int(differs.argmax()) if differs.any() else shared
        units.append(_Unit([replace(path, shared=shared)], len(path), len(path) - shared))
    return units


def _chain_paths(paths: Sequence[_Path]) -> list[_Unit]:
    """Joins sorted paths to chains of which each path begins the next, with one row at most; the
    longest chain is first."""
    chains: list[list[_Path]] = []
    for path in paths:
        last = chains[-1] if chains else []
        has_row = path.number < 0 and any(other.number < 0 for other in last)
        if not last or has_row or not path.key.startswith(last[-1].key):
            chains.append([path])
        else:
            last.append(replace(path, shared=len(last[-1])))
    lengths = [len(chain[-1]) for chain in chains]
    units = [_Unit(chain, n, n) for chain, n in zip(chains, lengths, strict=True)]
    return sorted(units, key=lambda unit: unit.alone, reverse=True)


def _cut_units(units: Sequence[_Unit], limit: int, *, padded: bool) -> list[list[_Unit]]:
    """Cuts units into as few runs of at most `limit` tokens as possible; one that is longer is a
    run of its own. `padded`: every unit counts as many tokens as the first of its run."""
    runs: list[list[_Unit]] = []
    tokens = 0
    for unit in units:
        more = runs[-1][0].alone if runs and padded else unit.added
        if not runs or tokens + more > limit:
            runs.append([])
            tokens, more = 0, unit.alone
        runs[-1].append(unit)
        tokens += more
    return runs


def _build_packed_batch(run: Sequence[_Unit], token_ids: Tensor) -> PackedBatch:
    """Packs a micro-batch, whose first path shares nothing; an empty one becomes a single token
    without targets."""
    paths = [path for unit in run for path in unit.paths]
    kept = [0, *(path.shared for path in paths[1:])]
    count = sum(map(len, paths)) - sum(kept[: len(paths)])
    tokens, positions, ends = (np.zeros(max(1, count), np.int64) for _ in range(3))
    nodes = np.empty(max(map(len, paths), default=0), np.int64)  # of the path at hand
    at, rows, columns = [], [], []
    states: dict[tuple[int, int, int], int] = {}
    edges: list[tuple[int, int, int]] = []
    first = last = 0
    for path, shared in zip(paths, kept, strict=False):
        length, stop = len(path), first + len(path) - shared
        ends[nodes[shared:last]] = first
        nodes[shared:length] = np.arange(first, stop)
        tokens[first:stop] = path.tokens[shared:]
        positions[first:stop] = np.arange(shared, length)
        before = nodes[path.columns - 1]
        if path.number < 0:
            at.append(before)
            rows.append(np.full(len(before), path.row))
            columns.append(path.columns)
        else:
            left = [(node, path.row, int(path.columns[0])) for node in before.tolist()]
            slots = [states.setdefault(state, len(states)) for state in left]
            edges += zip(slots, path.branch, [path.number] * len(slots), strict=True)
        first, last = stop, length
    ends[nodes[:last]] = count
    if not paths:
        ends[0] = 1
    branches = PackedBranches(*_to_columns(list(states)), *_to_columns(edges))
    row, column = _join_indices(rows), _join_indices(columns)
    return PackedBatch(
        token_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        ends=torch.from_numpy(ends),
        sources=torch.cat([_join_indices(at), branches.at]),
        targets=token_ids[row, column],
        rows=row,
        columns=column,
        branches=branches,
    )


def _join_indices(parts: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))


def _to_columns(triples: Sequence[tuple[int, int, int]]) -> Tensor:
    return torch.tensor(triples, dtype=torch.int64).view(-1, 3).T


def pack_rows(
    token_ids: Tensor,
    is_token: Tensor,
    want: Tensor,
    *,
    branches: Branches | None = None,
    merge: bool = True,
) -> PackedBatch:
    """Packs rows and branches into one micro-batch, whatever its length.

    Args:
        token_ids: `[B, T]` int64.
        is_token: `[B, T]` bool, a prefix of each row.
        want: `[B, T]` bool, tokens whose log-probability is needed; never the first of a row. Rows
            without any are left out.
        branches: continuations whose tokens are all wanted.
        merge: False disables sharing: every row is a trie of its own, and so is a branch, unless
            its path begins another one's.
    """
    paths = _read_paths(token_ids, is_token, want, branches)
    return _build_packed_batch(_merge_paths(paths) if merge else _chain_paths(paths), token_ids)


class RankMicroBatches:
    """One rank's share of the wanted tokens; every rank has the same number of micro-batches.

    Rows are never split. A micro-batch is a run of rows in the order of their tokens, in which
    neighbours have most in common. Every rank cuts the whole batch, all alike, and packs its own
    share.

    Args:
        batch: all rows of the step, the same on every rank.
        limit: packed tokens per micro-batch; a longer row is a micro-batch of its own.
        merge: whether rows share prefixes; if not, padding counts as tokens.
        want, branches: as of `pack_rows`.

    Attributes:
        computed_tokens: packed tokens of all ranks, without padding; 0 if nothing is wanted.
        row_tokens: tokens of the rows they represent.
    """

    def __init__(
        self,
        batch: TokenBatch,
        want: Tensor,
        limit: int,
        ranks: Ranks,
        *,
        merge: bool,
        branches: Branches | None = None,
    ) -> None:
        self._shape, self._ranks = batch.token_ids.shape, ranks
        paths = _read_paths(batch.token_ids, batch.is_token, want, branches)
        units = _merge_paths(paths) if merge else _chain_paths(paths)
        # As few runs for each rank as the limit permits, the longest as short as possible.
        rounds = -(-len(_cut_units(units, limit, padded=not merge)) // ranks.count)

        def is_enough(tokens: int) -> bool:
            return len(_cut_units(units, tokens, padded=not merge)) <= rounds * ranks.count

        lowest = 1 + bisect_left(range(1, limit), True, key=is_enough)
        runs = _cut_units(units, lowest, padded=not merge)
        mine = runs[ranks.rank :: ranks.count]
        mine += [[]] * (-(-len(runs) // ranks.count) - len(mine))
        self._mine = [_build_packed_batch(run, batch.token_ids) for run in mine]
        self.computed_tokens = sum(
            run[0].alone + sum(unit.added for unit in run[1:]) for run in runs
        )
        represented = want.any(dim=1)
        if branches is not None:
            represented = represented.index_fill(0, branches.rows, True)
        self.row_tokens = int(batch.is_token[represented].sum())

    def __len__(self) -> int:
        """Number of micro-batches, the same for every rank; 0 if nothing is wanted."""
        return len(self._mine)

    def __iter__(self) -> Iterator[PackedBatch]:
        """Yields the micro-batches, on the rank's device; missing ones have no targets."""
        for packed in self._mine:
            yield packed.to(self._ranks.device)

    @torch.no_grad()
    def gather_token_values(self, ask: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Computes a value for every wanted token on all ranks, by a function that gives the `[M]`
        values of a micro-batch; returns on every rank `[B, T]` float32 on the CPU, 0 elsewhere."""
        result = torch.zeros(self._shape)
        for packed in self:
            result[packed.rows, packed.columns] = ask(packed).float().cpu()
        return self._ranks.sum_tensors(result)  # a token is computed on one rank only
