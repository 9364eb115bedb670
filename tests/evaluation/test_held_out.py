"""What trees of one answer amount to."""

import math

import pytest
from rows import each_row
from trees import turn

from rlx.evaluation.answers import (
    compute_held_out_metrics,
    compute_identical_share,
    read_answers,
)
from rlx.plugin import Problem
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, RolloutTree, Segment, build_rollout_plan
from rlx.spec import SCHEDULES, TurnSpec, TwoTurnRolloutSpec

NAN = math.nan
PLAN = build_rollout_plan(TwoTurnRolloutSpec(confidence=TurnSpec(template="?")))


def entry(name, raw, **parts):
    return RewardEntry(name, raw, 1.0, "absent" if raw is None else "scored", parts=parts)


def prompt(parent):
    return Segment(parent=parent, author="prompt", token_ids=(1,))


def held_out(*problems):
    """Measures problems, each given as (accuracy, its stated confidences)."""
    trees, turns = [], {}
    for t, (accuracy, confidences) in enumerate(problems):
        segments = [prompt(NO_PARENT), turn(0), prompt(1)]
        segments += [turn(2, kind="confidence", number=2) for _ in confidences]
        turns[t, 1] = {"accuracy": entry("accuracy", accuracy)}
        for s, stated in enumerate(confidences, start=3):
            parts = {} if math.isnan(stated) else {"confidence": stated}
            turns[t, s] = {"brier": entry("brier", 0.5, **parts)}
        problem = Problem(id=f"p{t}", prompt="", fields={}, stratum=f"s{t % 2}")
        trees.append(RolloutTree(problem, tuple(segments)))
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
    trees, turns = [], {}
    for t, confidence in enumerate(stated):
        segments = (prompt(NO_PARENT), turn(0))
        trees.append(RolloutTree(Problem(id=f"p{t}", prompt="", fields={}), segments))
        parts = {} if math.isnan(confidence) else {"confidence": confidence}
        turns[t, 1] = {"accuracy": entry("accuracy", 1.0), "brier": entry("brier", 0.5, **parts)}
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
        segments = [prompt(NO_PARENT)]
        for number, kind in enumerate(kinds, start=1):
            segments.append(turn(2 * number - 2, kind=kind, number=number))
            if number < len(kinds):
                segments.append(prompt(2 * number - 1))
            named = {"answer": "accuracy", "confidence": "brier"}.get(kind)
            parts = {"confidence": stated} if kind == "confidence" else {}
            turns[t, 2 * number - 1] = {named: entry(named, 1.0, **parts)} if named else {}
        trees.append(RolloutTree(Problem(id=f"p{t}", prompt="", fields={}), tuple(segments)))
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
