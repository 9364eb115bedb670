"""What trees of one answer amount to."""

import math

import pytest
from rows import each_row
from trees import asked, entry, tree, turn

from rlx.evaluation.answers import (
    compute_held_out_metrics,
    compute_identical_share,
    read_answers,
)
from rlx.reward import RewardTable
from rlx.rollout import build_rollout_plan
from rlx.spec import SCHEDULES, TurnSpec, TwoTurnRolloutSpec

NAN = math.nan
PLAN = build_rollout_plan(TwoTurnRolloutSpec(confidence=TurnSpec(template="?")))


def brier(stated):
    return {"brier": entry("brier", 0.5, **({} if math.isnan(stated) else {"confidence": stated}))}


def held_out(*problems):
    """Measures problems, each given as (accuracy, its stated confidences)."""
    trees, turns = [], {}
    for t, (accuracy, confidences) in enumerate(problems):
        below = [turn(2, kind="confidence", number=2) for _ in confidences]
        trees.append(tree(turn(0), asked(1), *below, name=f"p{t}", stratum=f"s{t % 2}"))
        turns[t, 1] = {"accuracy": entry("accuracy", accuracy)}
        turns |= {(t, s): brier(stated) for s, stated in enumerate(confidences, start=3)}
    return compute_held_out_metrics(PLAN, trees, RewardTable(turns, frozenset(), {}), "accuracy")


def test_one_answer_and_its_first_confidence():
    metrics, pairs = held_out(
        (1.0, [0.9, 0.2]), (0.0, [NAN, 0.3]), (0.5, [0.4, 0.4]), (None, [0.1, 0.7])
    )
    assert pairs["problem_ids"] == ["p0", "p1", "p2", "p3"]
    assert pairs["strata"] == ["s0", "s1", "s0", "s1"]
    assert pairs["correct"] == [1, 0, 0, 0], "only exactly 1 is correct; a fault is not"
    assert pairs["confidence"] == [0.9, None, 0.4, 0.1]
    assert metrics["alike_share"] == 0.25
    assert metrics["rewards"] == {"accuracy": 0.5, "brier": 0.5}


def test_metrics_of_a_schedule_without():
    metrics, pairs = held_out((1.0, []), (0.0, []))
    assert metrics["accuracy"] == 0.5
    assert [metrics[name] for name in ("brier", "ece", "auroc")] == [None] * 3
    assert pairs["confidence"] is None


def in_one_sequence(*stated):
    """Confidences stated in the answer itself."""
    trees = [tree(turn(0), name=f"p{t}") for t in range(len(stated))]
    right = {"accuracy": entry("accuracy", 1.0)}
    turns = {(t, 1): right | brier(confidence) for t, confidence in enumerate(stated)}
    return compute_held_out_metrics(PLAN, trees, RewardTable(turns, frozenset(), {}), "accuracy")


def test_a_confidence_may_stand_in_the_answer_itself():
    metrics, pairs = in_one_sequence(0.9, NAN)
    assert pairs["confidence"] == [0.9, None]
    assert (metrics["brier"], metrics["readable_share"]) == (pytest.approx(0.505), 0.5)
    assert in_one_sequence(0.9, 0.9)[0]["alike_share"] is None
    assert in_one_sequence(NAN, NAN)[1]["confidence"] is None, "nobody stated any"


@each_row(
    ("stated", "share"),
    [
        ([[0.5, 0.5], [0.1, 0.2]], 0.5),
        ([[NAN, NAN], [0.1, NAN]], 0.5),
        ([[0.5, 0.5, 0.5]], 1.0),
        ([[0.5], [0.5, 0.4]], 0.0),
        ([[0.5], [0.5]], None),
        ([], None),
    ],
)
def test_share_of_answers_whose_confidences_are_all_alike(stated, share):
    assert compute_identical_share(stated) == share


def grow_levels(*kinds):
    """One path of turns of these kinds, twice, with the stated confidences .7 and .2."""
    trees, turns = [], {}
    for t, stated in enumerate((0.7, 0.2)):
        rewards = {"answer": {"accuracy": entry("accuracy", 1.0)}, "confidence": brier(stated)}
        segments = []
        for number, kind in enumerate(kinds, start=1):
            segments += [turn(2 * number - 2, kind=kind, number=number), asked(2 * number - 1)]
            turns[t, 2 * number - 1] = rewards.get(kind, {})
        trees.append(tree(*segments[:-1], name=f"p{t}"))
    levels = [{"kind": kind, "template": ""} for kind in kinds]
    spec = SCHEDULES.validate_section({"schedule": "levels", "levels": levels})
    return build_rollout_plan(spec), trees, RewardTable(turns, frozenset(), {})


@each_row(
    "kinds",
    [
        ("answer", "confidence"),
        ("answer", "analysis", "confidence"),
        ("confidence", "answer"),
        ("confidence", "plan", "answer", "remark"),
    ],
)
def test_an_answer_has_the_confidence_of_its_trajectory_in_any_order(kinds):
    plan, trees, table = grow_levels(*kinds)
    _, pairs = compute_held_out_metrics(plan, trees, table, "accuracy")
    assert pairs["correct"] == [1, 1]
    assert pairs["confidence"] == [0.7, 0.2]
    answers = read_answers(plan, trees, table, "accuracy")
    assert [answer.confidences for answer in answers] == [(0.7,), (0.2,)]
