"""Prefix sharing as arithmetic: tries of random rows against brute force."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import each_row

from rlx.learner.pack import (
    RankMicroBatches,
    _count_common_prefix,
    collate_trees,
    distribute_trees,
    pack_trees,
)


@st.composite
def batches(draw):
    """Rows of three possible tokens, so that prefixes are shared often, wholly or not at all."""
    rows = draw(
        st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=7), min_size=1, max_size=9)
    )
    trees = draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    token_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    is_token = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
    chance = draw(st.lists(st.booleans(), min_size=len(rows) * width, max_size=len(rows) * width))
    want = torch.tensor(chance).reshape(len(rows), width) & is_token
    want[:, 0] = False
    return token_ids, is_token, torch.tensor(trees), want


def path(tree, node):
    """Tokens from the root to a node, by following `ends` upwards."""
    ancestors = [j for j in range(node + 1) if node < tree.ends[j]]
    return tree.token_ids[ancestors].tolist()


def prefixes(rows):
    return {tuple(row[: n + 1]) for row in rows for n in range(len(row))}


def rows_of(batch, numbers):
    token_ids, is_token, *_ = batch
    return [token_ids[b, is_token[b]].tolist() for b in numbers]


@given(batches())
def test_every_wanted_token_is_predicted_from_the_token_before_it(batch):
    token_ids, is_token, tree_ids, want = batch
    found = []
    for tree in pack_trees(token_ids, is_token, tree_ids, want, limit=1000):
        for at, row, column in zip(tree.at, tree.rows, tree.columns, strict=True):
            assert path(tree, int(at)) == token_ids[row, :column].tolist()
            found.append((int(row), int(column)))
    assert sorted(found) == [tuple(place) for place in want.nonzero().tolist()]


@given(batches())
def test_every_prefix_is_one_node(batch):
    token_ids, is_token, tree_ids, want = batch
    packed = pack_trees(token_ids, is_token, tree_ids, want, limit=1000)
    by_tree = {}
    for b in want.any(dim=1).nonzero()[:, 0].tolist():
        by_tree.setdefault(int(tree_ids[b]), []).append(b)
    assert len(packed) == len(by_tree)
    for tree, number in zip(packed, sorted(by_tree), strict=True):
        expected = prefixes(rows_of(batch, by_tree[number]))
        nodes = [tuple(path(tree, i)) for i in range(len(tree))]
        assert set(nodes) == expected
        assert len(nodes) == len(expected)
        assert tree.depths.tolist() == [len(node) - 1 for node in nodes]


@given(batches())
def test_a_node_is_an_ancestor_exactly_when_its_path_begins_the_other(batch):
    for tree in pack_trees(*batch, limit=1000):
        nodes = [path(tree, i) for i in range(len(tree))]
        for j, above in enumerate(nodes):
            for i, below in enumerate(nodes):
                is_ancestor = j <= i and i < int(tree.ends[j])
                assert is_ancestor == (below[: len(above)] == above)


@given(batches(), st.integers(1, 12))
def test_a_cut_loses_nothing_and_keeps_the_limit(batch, limit):
    token_ids, _, _, want = batch
    places = []
    trees = pack_trees(*batch, limit=limit)
    whole = [row for tree in trees for row in tree.rows.unique().tolist()]
    assert len(whole) == len(set(whole)), "a row's one ratio needs all of its tokens together"
    for tree in trees:
        assert len(tree) <= limit or len(tree.rows.unique()) == 1
        for at, row, column in zip(tree.at, tree.rows, tree.columns, strict=True):
            assert path(tree, int(at)) == token_ids[row, :column].tolist()
            places.append((int(row), int(column)))
    assert sorted(places) == [tuple(place) for place in want.nonzero().tolist()]


@given(*(st.lists(st.integers(0, 1), max_size=8) for _ in range(3)))
def test_the_common_prefix_of_two_paths_is_that_of_their_tokens_one_by_one(begin, one, other):
    a, b = (*begin, *one), (*begin, *other)
    equal = [x == y for x, y in zip(a, b, strict=False)]
    assert _count_common_prefix(a, b) == [*equal, False].index(False)


def test_nothing_wanted_packs_nothing():
    ids = torch.tensor([[1, 2]])
    want = torch.zeros(1, 2, dtype=torch.bool)
    assert pack_trees(ids, ids > 0, torch.tensor([0]), want, limit=10) == []


def test_two_turns_are_computed_once():
    """A prompt of 4, two answers of 3, a question of 2 and two confidences of 1 below each."""
    rows = [[1, 1, 1, 1, a, a, a] for a in (2, 3)]
    rows += [[*row, 8, 8, c] for row in rows for c in (5, 6)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    want = torch.zeros_like(ids, dtype=torch.bool)
    want[:2, 4:7] = True
    want[2:, 9] = True
    (tree,) = pack_trees(ids, ids > 0, torch.zeros(6, dtype=torch.int64), want, limit=100)
    assert len(tree) == 4 + 2 * (3 + 2 + 2)
    assert len(tree.at) == 2 * 3 + 4


# Micro-batches -----------------------------------------------------------------------------------


def tree_of(length):
    (tree,) = pack_trees(
        torch.ones(1, length, dtype=torch.int64),
        torch.ones(1, length, dtype=torch.bool),
        torch.zeros(1, dtype=torch.int64),
        torch.arange(length)[None] == length - 1,
        limit=1000,
    )
    return tree


lengths = st.lists(st.integers(2, 30), min_size=1, max_size=14)


@given(lengths, st.integers(1, 5), st.integers(1, 80), st.booleans())
def test_every_tree_is_dealt_once_in_equally_many_micro_batches(lengths, ranks, limit, padded):
    trees = [tree_of(n) for n in lengths]
    shares = distribute_trees(trees, ranks, limit, padded=padded)
    dealt = [id(tree) for share in shares for batch in share for tree in batch]
    assert sorted(dealt) == sorted(map(id, trees))
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    assert any(share[-1] for share in shares), "a micro-batch that is empty on every rank"
    for batch in (batch for share in shares for batch in share if len(batch) > 1):
        longest, tokens = max(map(len, batch)), sum(map(len, batch))
        assert (longest * len(batch) if padded else tokens) <= limit


@given(lengths, st.integers(1, 5))
def test_ranks_are_loaded_alike(lengths, ranks):
    shares = distribute_trees([tree_of(n) for n in lengths], ranks, 1000)
    loads = [sum(len(tree) for batch in share for tree in batch) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


@given(batches())
def test_one_after_the_other_each_token_sees_its_own_ancestors_alone(batch):
    trees = pack_trees(*batch, limit=6)
    if not trees:
        return
    packed = collate_trees(trees, batch[0])
    assert len(packed) == sum(map(len, trees))
    node = torch.arange(len(packed))
    sees = (node <= node[:, None]) & (node[:, None] < packed.ends)
    for source, row, column in zip(packed.sources, packed.rows, packed.columns, strict=True):
        seen = sees[source].nonzero()[:, 0]
        assert packed.token_ids[seen].tolist() == batch[0][row, :column].tolist()
        assert packed.positions[seen].tolist() == list(range(int(column)))
    assert torch.equal(packed.targets, batch[0][packed.rows, packed.columns])


@given(batches())
def test_without_merging_every_row_is_a_tree(batch):
    token_ids, is_token, _, want = batch
    trees = pack_trees(*batch, limit=6, merge=False)
    assert len(trees) == int(want.any(dim=1).sum())
    for tree in trees:
        (row,) = tree.rows.unique().tolist()
        assert tree.token_ids.tolist() == token_ids[row, is_token[row]].tolist()
        assert torch.equal(tree.columns, want[row].nonzero()[:, 0])


def test_an_empty_micro_batch_is_one_token_that_predicts_nothing():
    packed = collate_trees([], torch.ones(2, 3, dtype=torch.int64))
    assert len(packed) == 1
    assert packed.ends.tolist() == [1]
    assert len(packed.sources) == len(packed.targets) == 0


@each_row("limit", [1, 7])
def test_a_tree_longer_than_the_limit_is_a_micro_batch_of_its_own(limit):
    shares = distribute_trees([tree_of(9), tree_of(8)], 1, limit)
    assert [len(batch) for batch in shares[0]] == [1, 1]


class ThreadRanks:
    """Ranks that are threads of this process, one of which calls."""

    device = torch.device("cpu")

    def __init__(self, rank, count, meeting, told):
        self.rank, self.count, self._meeting, self._told = rank, count, meeting, told

    def gather(self, item):
        self._told[self.rank] = item
        self._meeting.wait()
        return list(self._told)


@given(batches(), st.integers(1, 4), st.integers(2, 12), st.booleans())
def test_ranks_that_pack_a_part_each_share_what_one_would_have_dealt(batch, count, limit, merge):
    rows = SimpleNamespace(**dict(zip(("token_ids", "is_token", "tree_ids"), batch, strict=False)))
    meeting, told = threading.Barrier(count), [None] * count

    def take_share(rank):
        ranks = ThreadRanks(rank, count, meeting, told)
        return RankMicroBatches(rows, batch[3], limit, ranks, merge=merge)

    with ThreadPoolExecutor(count) as threads:
        shares = list(threads.map(take_share, range(count)))
    trees = pack_trees(*batch, limit=limit, merge=merge)
    assert {share.computed_tokens for share in shares} == {sum(map(len, trees))}
    if not trees:
        assert [len(share) for share in shares] == [0] * count
        return
    expected = distribute_trees(trees, count, limit, padded=not merge)
    for share, dealt in zip(shares, expected, strict=True):
        for found, together in zip(share, dealt, strict=True):
            wanted = collate_trees(together, batch[0])
            for name in ("token_ids", "positions", "ends", "sources", "rows", "columns"):
                assert torch.equal(getattr(found, name), getattr(wanted, name)), name
