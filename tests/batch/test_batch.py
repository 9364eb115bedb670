"""Rows of tokens made from trees."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from rows import each_row
from token_trees import prompt, seen, turn

from rlx.batch import NO_TURN, build_token_batch, list_batch_rows
from rlx.errors import ShapeError
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree

F, T = False, True


def tree(*segments):
    return RolloutTree(Problem(id="p", prompt="?", fields={}), segments)


def two_turn():
    """Two answers; two confidences below the first, one below the second."""
    return tree(
        prompt(NO_PARENT, 1, 2),
        turn(0, 3, 4, 5, answer=((0, 3), (1, 2))),
        turn(0, 6, reason="length"),
        prompt(1, 7),
        prompt(2, 8, 9),
        turn(3, 10, kind="confidence", number=2),
        turn(3, 11, 12, kind="confidence", number=2, confidence=((0, 2), (1, 1))),
        turn(4, 13, kind="confidence", number=2, reason="length"),
    )


def environment():
    """prompt -> query -> observation -> query -> observation -> answer, and one short answer."""
    return tree(
        prompt(NO_PARENT, 1),
        turn(0, 2, 3, kind="query", query=((0, 1), (0, 1))),
        seen(1, 4, 5),
        turn(2, 6, kind="query", number=2),
        seen(3, 7),
        turn(4, 8, 9, number=3, answer=((0, 1), (1, 1))),
        turn(0, 10, reason="length"),
    )


def test_an_answer_is_a_row_and_a_confidence_is_a_row_below_its_own_answer():
    batch = build_token_batch([two_turn()])
    assert batch.token_ids.tolist() == [
        [1, 2, 3, 4, 5, 0, 0, 0],
        [1, 2, 6, 0, 0, 0, 0, 0],
        [1, 2, 3, 4, 5, 7, 10, 0],
        [1, 2, 3, 4, 5, 7, 11, 12],
        [1, 2, 6, 8, 9, 13, 0, 0],
    ]
    assert [batch.token_ids[b][batch.is_own[b]].tolist() for b in range(5)] == [
        [3, 4, 5],
        [6],
        [10],
        [11, 12],
        [13],
    ]
    assert batch.is_token.sum(dim=1).tolist() == [5, 3, 7, 8, 6]
    assert [(r.segment, r.turns, r.parent, r.kind, r.level) for r in batch.rows] == [
        (1, (1,), NO_PARENT, "answer", 0),
        (2, (2,), NO_PARENT, "answer", 0),
        (5, (5,), 1, "confidence", 1),
        (6, (6,), 1, "confidence", 1),
        (7, (7,), 2, "confidence", 1),
    ]


def test_rows_are_compared_with_those_that_continue_the_same_turn():
    batch = build_token_batch([two_turn(), two_turn()])
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert batch.levels.tolist() == [0, 0, 1, 1, 1] * 2
    assert batch.tree_ids.tolist() == [0] * 5 + [1] * 5


def test_different_questions_about_one_answer_are_not_compared():
    forked = tree(
        prompt(NO_PARENT, 1),
        turn(0, 2),
        prompt(1, 3),
        prompt(1, 4),
        turn(2, 5, kind="confidence", number=2),
        turn(3, 6, kind="review", number=2),
    )
    assert build_token_batch([forked]).group_ids.tolist() == [0, 1, 2]


def test_what_is_known_of_each_token():
    batch = build_token_batch([two_turn()], temperatures={"answer": 0.5})
    assert batch.is_end.int().tolist() == [
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0] * 8,
        [0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0] * 8,
    ]
    none = NO_TURN
    assert batch.turn_ids[0].tolist() == [none, none, 1, 1, 1, none, none, none]
    assert batch.turn_ids[3].tolist() == [none] * 6 + [2, 2]
    assert batch.behaviour_logprobs[0].tolist() == [0, 0, -0.375, -0.5, -0.625, 0, 0, 0]
    assert batch.behaviour_logprobs[3].tolist() == [0] * 6 + [-1.375, -1.5]
    assert batch.temperatures[0].tolist() == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1]
    assert batch.temperatures[3].tolist() == [1] * 8, "not named: 1; the answer is not its own"


def test_spans_are_those_of_the_rows_own_turn():
    batch = build_token_batch([two_turn()])
    assert set(batch.spans) == set(batch.contents) == {"answer", "confidence"}
    assert batch.spans["answer"].tolist() == [[F, F, T, T, T, F, F, F], *[[F] * 8] * 4]
    assert batch.contents["answer"].tolist() == [[F, F, F, T, F, F, F, F], *[[F] * 8] * 4]
    assert batch.spans["confidence"][3].tolist() == [F] * 6 + [T, T]
    assert not batch.contents["confidence"].any(), "nothing stands between the tags"


def test_a_trajectory_with_an_environment_is_one_row_with_all_of_its_turns():
    batch = build_token_batch([environment()], temperatures={"query": 0.5, "answer": 2.0})
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 10] + [0] * 7]
    assert batch.is_own[0].int().tolist() == [0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert batch.turn_ids[0].tolist() == [-1, 1, 1, -1, -1, 2, -1, 3, 3]
    assert batch.is_end[0].int().tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert batch.temperatures[0].tolist() == [1, 0.5, 0.5, 1, 1, 0.5, 1, 2, 2]
    assert batch.spans["query"][0].int().tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert batch.spans["answer"][0].int().tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert batch.behaviour_logprobs[0].tolist() == [0, -0.25, -0.375, 0, 0, -0.75, 0, -1, -1.125]
    assert [(r.turns, r.parent, r.kind, r.level) for r in batch.rows] == [
        ((1, 3, 5), NO_PARENT, "answer", 0),
        ((6,), NO_PARENT, "answer", 0),
    ]
    assert batch.group_ids.tolist() == [0, 0]


def test_a_confidence_after_a_trajectory_continues_its_last_turn():
    asked = tree(
        *environment().segments,
        prompt(5, 11),
        turn(7, 12, kind="confidence", number=4),
    )
    row = list_batch_rows([asked])[-1]
    assert (row.turns, row.parent, row.level, row.kind) == ((8,), 5, 1, "confidence")
    assert build_token_batch([asked]).token_ids[-1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12]


def test_trajectories_that_fork_after_an_observation_each_hold_the_turns_they_share():
    forked = tree(
        prompt(NO_PARENT, 1), turn(0, 2), seen(1, 3), turn(2, 4, number=2), turn(2, 5, number=2)
    )
    batch = build_token_batch([forked])
    assert [row.turns for row in batch.rows] == [(1, 3), (1, 4)]
    assert batch.token_ids.tolist() == [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert batch.is_own.tolist() == [[F, T, F, T]] * 2
    assert batch.group_ids.tolist() == [0, 0]


def test_rows_can_be_left_out_and_the_rest_keep_their_company():
    batch = build_token_batch([two_turn(), two_turn()], without={(0, 1), (0, 5), (0, 6), (1, 7)})
    assert [(r.tree, r.segment) for r in batch.rows] == [
        (0, 2),
        (0, 7),
        (1, 1),
        (1, 2),
        (1, 5),
        (1, 6),
    ]
    assert batch.group_ids.tolist() == [0, 1, 2, 2, 3, 3]
    assert batch.token_ids.shape == (6, 8)


@each_row("without", [[], [(0, 1)]])
def test_no_rows_are_no_batch(without):
    trees = [tree(prompt(NO_PARENT, 1), turn(0, 2))] if without else []
    with pytest.raises(ShapeError, match="zero rollouts"):
        build_token_batch(trees, without=without)


@st.composite
def trees(draw):
    """Any tree: a parent is any segment before; prompts below prompts and policies below policies
    too, since a batch only asks for the order."""
    segments = [prompt(NO_PARENT, 1)]
    for at in range(1, draw(st.integers(2, 9))):
        parent = draw(st.integers(0, at - 1))
        number = 1
        node = parent
        while node != NO_PARENT:
            number += segments[node].author == "policy"
            node = segments[node].parent
        ids = tuple(range(10 * at, 10 * at + draw(st.integers(1, 3))))
        make = draw(st.sampled_from([turn, turn, prompt, seen]))
        segments.append(turn(parent, *ids, number=number) if make is turn else make(parent, *ids))
    return tree(*segments, turn(0, 99))


@settings(max_examples=60)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_every_turn_is_trained_and_padding_is_not(grown):
    batch = build_token_batch(grown)
    assert {(r.tree, s) for r in batch.rows for s in r.turns} == {
        (t, s) for t, one in enumerate(grown) for s in one.policy_segments
    }
    for b, row in enumerate(batch.rows):
        one = grown[row.tree]
        ids = one.token_ids(row.segment)
        assert tuple(batch.token_ids[b][batch.is_token[b]].tolist()) == ids
        assert batch.is_token[b].tolist() == [True] * len(ids) + [False] * (
            batch.is_token.shape[1] - len(ids)
        )
        own = [t for s in row.turns for t in one.segments[s].token_ids]
        assert batch.token_ids[b][batch.is_own[b]].tolist() == own
    assert not (batch.is_own & ~batch.is_token).any()
    assert torch.equal(batch.turn_ids > 0, batch.is_own)
    assert not (batch.is_end & ~batch.is_own).any()
    assert (batch.behaviour_logprobs[~batch.is_own] == 0).all()
