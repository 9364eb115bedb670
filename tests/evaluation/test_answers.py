"""What the answers of a set amount to, and how sure that is."""

import math
from dataclasses import replace

import numpy as np
import pytest
from rows import each_row

from rlx.evaluation.answers import ScoredAnswer, build_pairs, compute_answer_metrics
from rlx.evaluation.calibration import measure_calibration
from rlx.evaluation.pictures import draw_suite
from rlx.evaluation.statistics import EvaluationAnswers, compute_bootstrap_intervals


def answer(problem, sample, correct, *confidences, said="7", stratum="2"):
    return ScoredAnswer(
        problem=problem,
        problem_id=f"p{problem}",
        stratum=stratum,
        sample=sample,
        text=f"<answer>{said}</answer>",
        said=said,
        correct=correct,
        confidences=confidences,
        confidence_texts=tuple(f"sure: {c}" for c in confidences),
        rewards={"accuracy": float(correct)},
        tokens=3,
        truncated=False,
    )


def answered(samples=4, problems=30):
    """Half of the answers right; a confidence that knows a little."""
    rng = np.random.default_rng(0)
    return [
        answer(
            p, s, int(p % 2 == 0), float(np.clip(0.4 + 0.2 * (p % 2 == 0) + rng.normal() / 5, 0, 1))
        )
        for p in range(problems)
        for s in range(samples)
    ]


def test_figures_are_those_of_all_pairs():
    answers = answered()
    told = compute_answer_metrics(answers, seed=0, draws=50)
    pairs = [a.correct for a in answers], [a.confidences[0] for a in answers]
    measured = measure_calibration(*pairs, [a.stratum for a in answers])
    assert told["problems"] == 30
    assert told["n"] == 120
    assert (told["brier"], told["auroc"]) == (measured["brier"], measured["auroc"])
    assert told["rewards"] == {"accuracy": told["accuracy"]}
    for name, (low, high) in told["intervals"].items():
        assert low <= high, name
        assert low - 0.2 <= told[name] <= high + 0.2
    assert told["scaling"]["k"] == [1, 2, 4]


def test_without_confidences_there_is_accuracy_alone_and_no_picture(tmp_path):
    answers = [answer(p, 0, p % 2) for p in range(9)]
    told = compute_answer_metrics(answers, seed=0, draws=20)
    assert draw_suite({"near": answers}, {"near": told}, frozenset(), tmp_path) == []
    assert told["accuracy"] == pytest.approx(4 / 9)
    assert told["brier"] is told["scaling"] is None
    assert told["by_stratum"]["2"]["n"] == 9
    assert set(told["intervals"]) == {"accuracy"}


def test_an_unreadable_confidence_is_counted_and_none_in_json():
    answers = [answer(0, 0, 1, math.nan), answer(1, 0, 0, 0.5)]
    assert compute_answer_metrics(answers, seed=0, draws=20)["readable_share"] == 0.5
    assert [a.to_json()["confidences"] for a in answers] == [[None], [0.5]]


@each_row(
    ("readable", "brier", "ece"),
    [(3, (3 * 0.0025 + 1) / 4, (3 * 0.05 + 1) / 4), (1, 3.0025 / 4, 3.05 / 4), (0, None, None)],
)
def test_confidences_that_nobody_can_read_have_no_calibration(readable, brier, ece):
    """Four wrong answers: an unreadable confidence counts as 1, the worst one."""
    answers = [answer(n, 0, 0, 0.05 if n < readable else math.nan) for n in range(4)]
    told = compute_answer_metrics(answers, seed=0, draws=20)
    assert told["brier"] == (brier and pytest.approx(brier))
    assert told["ece"] == (ece and pytest.approx(ece))
    assert (told["accuracy"], told["readable_share"]) == (0.0, readable / 4)
    assert told["unparsable"] == 4 - readable
    assert ("brier" in told["intervals"]) == ("mean_confidence" in told) == (readable > 0)
    compared = EvaluationAnswers.from_payload(build_pairs(answers))
    assert ("brier" in compared.values) == (readable > 0)


def test_intervals_of_what_is_undefined():
    assert compute_bootstrap_intervals([1, 1], {"x": lambda at: 0.0}, seed=0) == {"x": None}
    assert compute_bootstrap_intervals([1, 2], {"x": lambda at: None}, seed=0) == {"x": None}
    assert compute_bootstrap_intervals(range(9), {"x": lambda at: 0.5}, seed=0) == {"x": (0.5, 0.5)}


def test_a_problem_that_is_asked_again_is_no_more_evidence():
    """Small tasks run out of problems: a set of 300 may hold 80."""
    once = [replace(answer(n, 0, n % 2, 0.5), problem_id=f"p{n}") for n in range(20)]
    again = [replace(a, problem=20 + a.problem) for a in once]
    low, high = compute_answer_metrics(once, seed=0)["intervals"]["accuracy"]
    assert compute_answer_metrics([*once, *again], seed=0)["intervals"]["accuracy"] == (low, high)
