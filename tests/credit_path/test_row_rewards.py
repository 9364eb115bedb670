"""From a table of named rewards to the rewards and labels of rows."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rows import each_row
from trees import conversation, entry, tree, turn

from rlx.batch import build_token_batch
from rlx.reward import RewardTable
from rlx.step import (
    build_scored_rows,
    compute_answer_scores,
    find_lost_rows,
    join_row_rewards,
    place_row_rewards,
)


@each_row(
    ("values", "label"),
    [
        ({1: 1.0, 2: 0.0}, 0.0),
        ({1: 0.0, 2: 1.0}, 1.0),
        ({1: 1.0}, 1.0),
        ({1: 0.0, 2: None}, 0.0),
        ({}, math.nan),
    ],
)
def test_a_label_is_the_value_at_the_nearest_turn_that_has_one(values, label):
    """Two answers, and a confidence after them that has no value of its own."""
    asked = tree(turn(0), turn(1, number=2), turn(2, kind="confidence", number=3))
    entries = {(0, s): {"accuracy": entry("accuracy", value)} for s, value in values.items()}
    table = RewardTable(entries, frozenset(), {})
    batch = build_token_batch([asked])
    rows = join_row_rewards(batch, [asked], table, batch.is_own, label="accuracy")
    assert rows.rewards.labels.tolist() == pytest.approx([label], nan_ok=True)


def scored(weight=1.0, **values):
    """Named rewards of one turn or rollout, None where one is absent."""
    return {name: entry(name, value, weight) for name, value in values.items()}


# Two rollouts of two turns: segments 1 and 3, with an observation between them, and 4 and 6.
TWICE = [("try", "ab", {}, "o"), ("try", "c", {}, None)]
TREE = conversation(TWICE, TWICE)
TABLE = RewardTable(
    turns={
        (0, 1): scored(2.0, correct=0.5, _noted=9.0),
        (0, 3): scored(2.0, correct=0.75),
        (0, 4): scored(2.0, correct=None),
        (0, 6): scored(2.0, correct=0.25) | scored(0.5, form=2.0),
    },
    dropped=frozenset(),
    faults={},
    rollouts={(0, 3): scored(4.0, whole=0.75)},
)


def test_rewards_are_summed_by_turn_and_an_absent_one_is_no_zero():
    batch = build_token_batch([TREE])
    rewards = join_row_rewards(batch, [TREE], TABLE, batch.is_own).rewards
    assert rewards.turn_rewards.tolist() == [[1.0, 1.5], [0.0, 1.5]]
    assert rewards.turn_present.tolist() == [[True, True], [False, True]]
    assert rewards.global_rewards.tolist() == [3.0, 0.0]
    assert rewards.labels is None
    # By scope and name: whole, correct, form. A note counts nowhere.
    nan = math.nan
    expected = torch.tensor([[0.75, 0.625, nan], [nan, 0.25, 2.0]])
    torch.testing.assert_close(rewards.named_rewards, expected, equal_nan=True, rtol=0, atol=0)
    assert rewards.reward_weights == (4.0, 2.0, 0.5)


def test_a_row_is_lost_where_it_was_dropped_or_has_no_reward():
    alone = conversation(TWICE)
    trees = [TREE, alone]
    assert find_lost_rows(trees, TABLE) == {(1, 3)}
    dropped = RewardTable(TABLE.turns, frozenset({(0, 6)}), {}, {(1, 3): scored(whole=0.0)})
    assert find_lost_rows(trees, dropped) == {(0, 6)}
    assert find_lost_rows(trees, TABLE, needs_reward=False) == set()
    assert find_lost_rows(trees, dropped, needs_reward=False) == {(0, 6)}


def test_an_answer_scores_its_turn_and_its_rollout():
    trees = [conversation([("answer", "a", {}, None)])] * 4
    table = RewardTable(
        turns={(0, 1): scored(2.0, right=0.25), (1, 1): scored(right=None), (2, 1): scored(a=1.0)},
        dropped=frozenset(),
        faults={},
        rollouts={(0, 1): scored(whole=3.0), (1, 1): scored(whole=-1.0)},
    )
    assert compute_answer_scores(trees, table, [3, 2, 1, 0]).tolist() == [0.0, 1.0, -1.0, 3.5]


def test_rows_are_left_out_and_labelled_as_the_loss_says():
    def build(without=(), expected=None, mask=None):
        setup = SimpleNamespace(
            spec=SimpleNamespace(loss=SimpleNamespace(expected=expected)),
            temperatures={},
            mask=lambda batch: batch.is_own,
            label="correct",
        )
        return build_scored_rows(setup, [TREE], TABLE, without=without, mask=mask)

    assert build({(0, 3), (0, 6)}) is None
    one = build({(0, 3)})
    assert [row.segment for row in one.batch.rows] == [6]
    assert one.rewards.labels.tolist() == [0.25]
    assert torch.equal(one.mask, one.batch.is_own)
    both = build()
    assert both.rewards.labels.tolist() == [0.75, 0.25]
    over = build(expected=SimpleNamespace(over="prompt"))
    assert over.rewards.labels.tolist() == [0.5, 0.5]  # of 0.5, 0.75 and 0.25
    known = torch.zeros_like(both.mask)
    assert build(mask=known).mask is known


def test_a_reward_that_is_no_number_is_refused_beside_others_that_are():
    rules = SimpleNamespace(credit=None, placement=None)
    for place, table in (((0, 3), "turns"), ((0, 3), "rollouts")):
        entries = {**getattr(TABLE, table), place: scored(correct=math.inf)}
        batch = build_token_batch([TREE])
        broken = replace(TABLE, **{table: entries})
        rows = join_row_rewards(batch, [TREE], broken, batch.is_own)
        with pytest.raises(ValueError, match="a reward is not finite"):
            place_row_rewards(rows, rules)
