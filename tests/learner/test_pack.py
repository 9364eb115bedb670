"""Prefix sharing as arithmetic: tries of random rows against brute force."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.learner.distributed import Ranks
from rlx.learner.pack import RankMicroBatches, pack_rows


def build_batch(rows, learned):
    """Token ids, token mask and wanted tokens of rows, each wanted from a position on."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    column = torch.arange(width)
    is_token = column < torch.tensor([[len(row)] for row in rows])
    return ids, is_token, is_token & (column >= torch.tensor(learned)[:, None])


@st.composite
def batches(draw):
    """Rows of three possible tokens, so that prefixes are shared often, wholly or not at all."""
    rows = draw(
        st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=7), min_size=1, max_size=9)
    )
    ids, is_token, _ = build_batch(rows, [0] * len(rows))
    more = draw(st.integers(0, 2))
    ids, is_token = (torch.nn.functional.pad(t, (0, more)) for t in (ids, is_token))
    chance = draw(st.lists(st.booleans(), min_size=ids.numel(), max_size=ids.numel()))
    want = torch.tensor(chance).view(ids.shape) & is_token
    want[:, 0] = False
    return ids, is_token, want


def path(packed, node):
    """Tokens from the root to a node, by following `ends` upwards."""
    ancestors = [j for j in range(node + 1) if node < packed.ends[j]]
    assert packed.positions[ancestors].tolist() == list(range(len(ancestors)))
    return packed.token_ids[ancestors].tolist()


def prefixes(batch):
    ids, is_token, want = batch
    rows = [ids[b, is_token[b]].tolist() for b in want.any(dim=1).nonzero()[:, 0].tolist()]
    return {tuple(row[: n + 1]) for row in rows for n in range(len(row))}


def places(packed):
    return list(zip(packed.rows.tolist(), packed.columns.tolist(), strict=True))


def share(batch, limit=1000, rank=0, ranks=1, merge=True):
    rows = SimpleNamespace(token_ids=batch[0], is_token=batch[1])
    here = Ranks(rank, ranks, torch.device("cpu"))
    return RankMicroBatches(rows, batch[2], limit, here, merge=merge)


@given(batches(), st.booleans())
def test_every_wanted_token_is_predicted_from_the_tokens_before_it(batch, merge):
    packed = pack_rows(*batch, merge=merge)
    for at, (row, column) in zip(packed.sources.tolist(), places(packed), strict=True):
        assert path(packed, at) == batch[0][row, :column].tolist()
    assert sorted(places(packed)) == [tuple(place) for place in batch[2].nonzero().tolist()]
    assert torch.equal(packed.targets, batch[0][packed.rows, packed.columns])


@given(batches())
def test_every_prefix_of_any_row_is_one_node(batch):
    if not batch[2].any():
        return
    packed = pack_rows(*batch)
    nodes = [tuple(path(packed, i)) for i in range(len(packed))]
    assert len(nodes) == len(set(nodes))
    assert set(nodes) == prefixes(batch)


@given(batches())
def test_a_node_is_an_ancestor_exactly_when_its_path_begins_the_other(batch):
    packed = pack_rows(*batch)
    nodes = [path(packed, i) for i in range(len(packed))]
    for j, above in enumerate(nodes):
        for i, below in enumerate(nodes):
            is_ancestor = j <= i and i < int(packed.ends[j])
            assert is_ancestor == (below[: len(above)] == above)


SYSTEM = [9] * 4


def test_what_nobody_wants_is_not_packed():
    ids, is_token, want = build_batch([[1, 2], [3, 4]], [1, 2])
    assert pack_rows(ids, is_token, want).token_ids.tolist() == [1, 2]
    nothing = share((ids, is_token, torch.zeros_like(want)))
    assert (len(nothing), nothing.computed_tokens, nothing.row_tokens) == (0, 0, 0)


def test_an_empty_micro_batch_is_one_token_that_predicts_nothing():
    ids = torch.ones(2, 3, dtype=torch.int64)
    packed = pack_rows(ids, ids > 0, ids > 1)
    assert packed.token_ids.tolist() == packed.positions.tolist() == [0]
    assert packed.ends.tolist() == [1]
    assert len(packed.sources) == len(packed.targets) == len(packed.branches.at) == 0


def count_tokens(batch, packed, merge):
    """Tokens that a form computes for a micro-batch, by brute force."""
    rows = packed.rows.unique()
    if merge:
        only = torch.zeros_like(batch[2]).index_copy(0, rows, batch[2][rows])
        return len(prefixes((batch[0], batch[1], only)))
    lengths = batch[1].sum(dim=1)[rows]
    return int(lengths.max()) * len(rows) if len(rows) else 0


@given(batches(), st.integers(1, 4), st.integers(1, 14), st.booleans())
def test_ranks_share_all_rows_in_equally_many_micro_batches(batch, count, limit, merge):
    shares = [share(batch, limit, rank, count, merge) for rank in range(count)]
    dealt = [packed for one in shares for packed in one]
    assert len({len(one) for one in shares}) == 1
    found = [place for packed in dealt for place in places(packed)]
    assert sorted(found) == [tuple(place) for place in batch[2].nonzero().tolist()]
    rows = [row for packed in dealt for row in packed.rows.unique().tolist()]
    assert len(rows) == len(set(rows)), "a row's one ratio needs all of its tokens together"
    for packed in dealt:
        tokens = count_tokens(batch, packed, merge)
        assert tokens <= limit or len(packed.rows.unique()) == 1
        for at, (row, column) in zip(packed.sources.tolist(), places(packed), strict=True):
            assert path(packed, at) == batch[0][row, :column].tolist()
    computed = sum(len(packed) for packed in dealt if len(packed.targets))
    assert {one.computed_tokens for one in shares} == {computed}
    if len(shares[0]):
        assert any(len(list(one)[-1].targets) for one in shares), "a round without any row"


DEALT = {
    (1000, 1): [[4 + 6 * (1 + 2)]],
    (1000, 2): [[4 + 3 * 3], [4 + 3 * 3]],
    (1000, 4): [[4 + 2 * 3], [4 + 2 * 3], [4 + 2 * 3], [1]],
    (13, 1): [[4 + 3 * 3, 4 + 3 * 3]],
    (12, 1): [[4 + 2 * 3] * 3],
    (12, 2): [[10, 10], [10, 1]],
    (7, 2): [[7, 7, 7], [7, 7, 7]],
    (1, 2): [[7, 7, 7], [7, 7, 7]],
}
"""By limit and ranks: tokens of every micro-batch of every rank, of six rows of a prefix of 4, a
token of the problem and two of the answer; 1 is a filler."""


def test_a_prefix_is_computed_once_in_every_micro_batch_and_ranks_are_loaded_alike():
    batch = build_batch([[*SYSTEM, n, 5, 5] for n in range(1, 7)], [5] * 6)
    found = {
        (limit, ranks): [
            [len(packed) for packed in share(batch, limit, rank, ranks)] for rank in range(ranks)
        ]
        for limit, ranks in DEALT
    }
    assert found == DEALT
    for limit, ranks in DEALT:
        real = sum(n for one in DEALT[limit, ranks] for n in one if n > 1)
        assert share(batch, limit, 0, ranks).computed_tokens == real
        assert share(batch, limit, 0, ranks).row_tokens == 6 * 7


@pytest.mark.parametrize(("count", "tokens"), [(2, [[16], [16]]), (4, [[8], [8], [8], [8]])])
def test_padded_rows_of_ranks_are_cut_by_what_their_padding_costs(count, tokens):
    batch = build_batch([[1] * n for n in (8, 8, 4, 4, 4, 4)], [1] * 6)
    shares = [share(batch, 16, rank, count, merge=False) for rank in range(count)]
    assert [[len(packed) for packed in one] for one in shares] == tokens
