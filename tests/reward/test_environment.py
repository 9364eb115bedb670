"""Rewards that look around, in real workers, on a tree with an environment in it."""

import sys
from pathlib import Path

import pytest
import trees

sys.path.insert(0, str(Path(__file__).parent))  # spawned workers inherit it

from considerate_rewards import found_something, nearest_to_mean, novelty

from rlx.plugin import Problem
from rlx.reward import NamedReward, RewardPool, score_rollouts
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx.spec import TurnReward


def turn(parent, kind, number, text, **info):
    return trees.turn(parent, text, kind=kind, number=number, info=info)


def reply(parent):
    return Segment(parent=parent, author="environment", token_ids=(1,), text="found: nothing new")


# Two rollouts of one prompt, each query ─ reply ─ query ─ reply ─ answers.
TREE = RolloutTree(
    Problem(id="graph", prompt="?", fields={}),
    (
        Segment(parent=NO_PARENT, author="prompt", token_ids=(1,)),
        turn(0, "query", 1, "who", status="ok", rows=2),
        reply(1),
        turn(2, "query", 2, "who", status="repeated", rows=2),
        reply(3),
        turn(4, "answer", 3, "1"),
        turn(4, "answer", 3, "5"),
        turn(4, "answer", 3, "4"),
        turn(0, "query", 1, "where", status="ok", rows=0),
        reply(8),
        turn(9, "query", 2, "who", status="ok", rows=1),
        reply(10),
        turn(11, "answer", 3, "5"),
    ),
)


@pytest.fixture(scope="module")
def table():
    rewards = [
        NamedReward("found", TurnReward(plugin="found", turn="query"), found_something()),
        NamedReward("mean", TurnReward(plugin="mean", turn="answer"), nearest_to_mean()),
        NamedReward("novel", TurnReward(plugin="novel", turn="query"), novelty()),
        NamedReward("new", TurnReward(plugin="new", turn="answer"), novelty()),
    ]
    with RewardPool(workers=1, memory_mb=256) as pool:
        return score_rollouts([TREE], rewards, pool)


def raws(table, name):
    return {place[1]: es[name].raw for place, es in table.turns.items() if name in es}


def test_a_reward_reads_what_the_environment_reported_of_the_turn(table):
    assert raws(table, "found") == {1: 1.0, 3: 0.0, 8: 0.0, 10: 1.0}
    assert table.turns[0, 3]["found"].reason == "repeated"


def test_siblings_are_the_turns_that_continue_the_same_turn(table):
    # 1, 5 and 4 have a mean of 3.33; the 5 of the other rollout is alone.
    assert raws(table, "mean") == {5: 0.0, 6: 0.0, 7: 1.0, 12: 1.0}


def test_a_group_is_all_turns_of_a_kind_for_one_prompt(table):
    assert raws(table, "novel") == pytest.approx({1: 1 / 3, 3: 1 / 3, 8: 1.0, 10: 1 / 3})
    assert raws(table, "new") == pytest.approx({5: 1.0, 6: 2 / 3, 7: 1.0, 12: 2 / 3})


def test_environment_segments_are_scored_by_nobody(table):
    assert set(table.turns) == {(0, s) for s in TREE.policy_segments}
    assert table.faults == {} and table.dropped == frozenset()
