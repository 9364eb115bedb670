"""What a tree refuses, and how it is walked."""

import pytest
from rows import each_row
from token_trees import prompt, seen, turn

from rlx.errors import TreeError
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree, Segment

PROBLEM = Problem(id="p0", prompt="?", fields={})


def chain():
    """prompt [1] -> policy [2, 3] -> environment [4] -> policy [5]; prompt [1] -> policy [6]."""
    return RolloutTree(
        PROBLEM,
        (
            prompt(NO_PARENT, 1),
            turn(0, 2, 3, kind="query"),
            seen(1, 4),
            turn(2, 5, number=2),
            turn(0, 6),
        ),
    )


def test_walking_a_tree():
    tree = chain()
    assert tree.path(3) == (0, 1, 2, 3)
    assert tree.turns(3) == (1, 3)
    assert tree.token_ids(3) == (1, 2, 3, 4, 5)
    assert tree.token_ids(4) == (1, 6)
    assert [tree.count_tokens(s) for s in range(5)] == [1, 3, 4, 5, 2]
    assert tree.policy_segments == (1, 3, 4)


def test_a_rollout_ends_where_nothing_but_a_prompt_follows():
    tree = chain()
    assert tree.own_turns(3) == ((1, 3), NO_PARENT)
    assert tree.own_turns(4) == ((4,), NO_PARENT)
    assert tree.rollouts == (3, 4)
    asked = RolloutTree(PROBLEM, (*tree.segments, prompt(3, 7), turn(5, 8, number=3)))
    assert asked.own_turns(6) == ((6,), 3)
    assert asked.rollouts == (3, 4), "a confidence is no rollout of its own"


@each_row("parent", [0, 1, 5, -2])
def test_a_parent_must_come_before_its_child(parent):
    with pytest.raises(TreeError, match=f"segment 0 of 'p0' names parent {parent}"):
        RolloutTree(PROBLEM, (prompt(parent, 1),))


@each_row(
    ("change", "complaint"),
    [
        ({"logprobs": (-0.1,)}, "a segment of 2 policy tokens needs 2 logprobs, got 1"),
        ({"author": "prompt"}, "a segment of 2 prompt tokens needs 0 logprobs, got 2"),
        ({"author": "environment"}, "a segment of 2 environment tokens needs 0 logprobs, got 2"),
        ({"turn": 0}, "needs a turn number from 1 and a kind"),
        ({"kind": ""}, "needs a turn number from 1 and a kind"),
        ({"token_ids": (), "logprobs": ()}, "needs at least one token"),
    ],
)
def test_malformed_segments_are_refused(change, complaint):
    good = {
        "parent": 0,
        "author": "policy",
        "token_ids": (1, 2),
        "logprobs": (-0.1, -0.2),
        "turn": 1,
        "kind": "answer",
    }
    with pytest.raises(TreeError, match=complaint):
        Segment(**{**good, **change})
    assert Segment(**good).token_ids == (1, 2)
