"""Placement: worked examples, a plain loop as the oracle, and what must hold of every placement."""

import math
from typing import NamedTuple, get_args

import bound
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from rows import each_row

from rlx.credit import (
    CreditInputs,
    TurnWithoutTokens,
    place_rewards,
    sum_masked_returns,
    sum_token_rewards,
)
from rlx.discovery import list_installed_plugins
from rlx.errors import RlxError
from rlx.spec.estimator import TurnReduce

PLACEMENTS = [found.name for found in list_installed_plugins("placement")]


def near(expected, rel=1e-6, absolute=1e-9):
    return pytest.approx(expected, rel=rel, abs=absolute)


class Row(NamedTuple):
    """One rollout in plain Python. A turn that was not rewarded is None."""

    turns: list[float | None]
    overall: float
    ids: list[int]
    mask: list[bool]


def placed(rows, *, placement, garbage=math.nan, dtype=torch.float64, padding=0, **options):
    """Rows as tensors, padded to the longest, `garbage` where nothing may be read."""
    width = max(len(row.ids) for row in rows) + padding
    turns = max(len(row.turns) for row in rows)
    rewards = torch.full((len(rows), turns), garbage, dtype=dtype)
    present, ids = torch.zeros(len(rows), turns, dtype=torch.bool), torch.ones(len(rows), width)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        for k, reward in enumerate(row.turns):
            if reward is not None:
                rewards[number, k], present[number, k] = reward, True
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        mask[number, : len(row.mask)] = torch.tensor(row.mask)
    overall = torch.tensor([row.overall for row in rows], dtype=dtype)
    where = bound.placement(placement)
    inputs = CreditInputs.from_rewards(rewards, present, overall, ids.long(), mask)
    return place_rewards(inputs, placement=where, **options), mask


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="turn_reduce is 'average', not one of sum, mean"):
        placed([Row([1.0], 0.0, [1], [True])], placement="turn_proportional", turn_reduce="average")


def oracle(row, *, placement, turn_reduce, on_missing_turn):
    """One row, as a textbook has it: token rewards, missing turns, lost reward."""
    rewarded = [k for k, reward in enumerate(row.turns) if reward is not None]
    where = {k: [] for k in rewarded}
    valid = [t for t, learns in enumerate(row.mask) if learns]
    for t in valid:
        if row.ids[t] - 1 in where:
            where[row.ids[t] - 1].append(t)
    reduce = turn_reduce or ("mean" if placement == "final_token_only" else "sum")
    worth = {k: row.turns[k] / (len(rewarded) if reduce == "mean" else 1) for k in rewarded}
    missing = [k in where and not where[k] for k in range(len(row.turns))]
    tokens = [0.0] * len(row.ids)
    if not valid:
        return tokens, missing, sum(worth.values()) + row.overall
    lost = 0.0
    for k in rewarded:
        homeless = not where[k] and placement != "final_token_only"
        if homeless and on_missing_turn == "drop":
            lost += worth[k]
        elif homeless or placement == "final_token_only":
            tokens[valid[-1]] += worth[k]
        elif placement == "turn_end":
            tokens[where[k][-1]] += worth[k]
        else:
            for t in where[k]:
                tokens[t] += worth[k] / len(where[k])
    for t in valid if placement == "turn_proportional" else valid[-1:]:
        tokens[t] += row.overall / (len(valid) if placement == "turn_proportional" else 1)
    return tokens, missing, lost


reward = st.floats(-10, 10)
tokens = st.lists(st.tuples(st.integers(-3, 6), st.booleans()), min_size=1, max_size=9)


@st.composite
def a_row(draw):
    ids, mask = zip(*draw(tokens), strict=True)
    turns = draw(st.lists(st.none() | reward, max_size=4))
    return Row(turns, draw(reward), list(ids), list(mask))


rows = st.lists(a_row(), min_size=1, max_size=5)
options = st.fixed_dictionaries(
    {
        "placement": st.sampled_from(PLACEMENTS),
        "turn_reduce": st.sampled_from([None, *get_args(TurnReduce)]),
        "on_missing_turn": st.sampled_from(["drop", "to_last_token"]),
    }
)


def test_the_turn_without_tokens_is_named_moved_or_refused():
    ids = [1, 1, -1, -1, 3, 3, -1, -1]
    row = Row([0.25, 0.25, 0.25], 0.3, ids, [turn > 0 for turn in ids])
    for placement in PLACEMENTS:
        result, _ = placed([row], placement=placement)
        assert result.missing.tolist() == [[False, True, False]]
    moved, mask = placed([row], placement="turn_proportional", on_missing_turn="to_last_token")
    assert moved.token_rewards[0].tolist() == near([0.2, 0.2, 0, 0, 0.2, 0.45, 0, 0])
    assert moved.missing.tolist() == [[False, True, False]] and moved.lost.item() == 0
    assert sum_token_rewards(moved.token_rewards, mask).item() == near(1.05)
    whole = Row([1.0], 0.0, [1], [True])
    with pytest.raises(TurnWithoutTokens, match="row 1, turn 2") as caught:
        placed([whole, row], placement="turn_end", on_missing_turn="error")
    assert (caught.value.row, caught.value.turn) == (1, 2)
    assert isinstance(caught.value, RlxError)


@given(rows, options)
def test_agrees_with_a_plain_loop_and_reads_nothing_absent(rows, options):
    result, _ = placed(rows, **options)
    for number, row in enumerate(rows):
        expected, missing, lost = oracle(row, **options)
        got = result.token_rewards[number]
        assert got[: len(row.ids)].tolist() == near(expected, 1e-12, 1e-12)
        assert not got[len(row.ids) :].any()
        assert result.missing[number, : len(row.turns)].tolist() == missing
        assert result.lost[number].item() == near(lost, 1e-12, 1e-12)


@given(rows, st.sampled_from(PLACEMENTS))
def test_error_is_raised_exactly_where_a_rewarded_turn_has_no_token(rows, placement):
    missing = placed(rows, placement=placement)[0].missing
    assume(missing.any())
    with pytest.raises(TurnWithoutTokens) as caught:
        placed(rows, placement=placement, on_missing_turn="error")
    assert missing[caught.value.row, caught.value.turn - 1]


@each_row("placement", PLACEMENTS)
def test_without_turns_or_without_tokens_there_is_still_an_answer(placement):
    only_global, _ = placed([Row([], 1.0, [1, 1], [True, True])], placement=placement)
    assert only_global.token_rewards.sum() == 1.0
    assert only_global.missing.shape == (1, 0)
    empty, _ = placed([Row([1.0], 1.0, [], [])], placement=placement)
    assert empty.token_rewards.shape == (1, 0) and empty.lost.tolist() == [2.0]


def test_sums_read_nothing_outside_the_mask():
    mask = torch.tensor([[True, False, True]])
    values = torch.tensor([[1.0, math.nan, 2.0]])
    assert (
        sum_token_rewards(values, mask).tolist()
        == sum_masked_returns(values, mask).tolist()
        == [3.0]
    )
