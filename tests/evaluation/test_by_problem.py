"""Differences problem by problem, against tests and figures computed in other ways."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, ttest_1samp

from rlx.evaluation.calibration import compute_brier, compute_clipped_losses
from rlx.evaluation.statistics import (
    EvaluationAnswers,
    compare_by_problem,
    compute_permutation_p_value,
)


def asked(correct, confidence=None, ids=None):
    ids = ids or [f"p{n}" for n in range(len(correct))]
    return EvaluationAnswers.from_payload(
        {"problem_ids": ids, "correct": list(correct), "confidence": confidence}
    )


confidences = st.one_of(st.none(), st.floats(0, 1), st.sampled_from([0.0, 1.0]))
pairs = st.lists(st.tuples(st.integers(0, 1), confidences), min_size=1, max_size=30)


@given(pairs)
def test_single_answers_have_the_means_that_evaluations_report(pairs):
    correct, stated = zip(*pairs, strict=True)
    values = asked(correct, list(stated)).values
    known = [np.nan if c is None else c for c in stated]
    assert np.mean(values["accuracy"]) == pytest.approx(np.mean(correct))
    if np.mean(~np.isnan(known)) < 0.1:
        assert set(values) == {"accuracy"}
        return
    assert np.mean(values["brier"]) == pytest.approx(compute_brier(correct, known))
    assert np.mean(values["nll"]) == pytest.approx(compute_clipped_losses(correct, known).mean())


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=12))
@settings(deadline=None)
def test_with_one_answer_each_it_is_the_exact_test_of_mcnemar(gaps):
    worse, better = gaps.count(-1.0), gaps.count(1.0)
    expected = binomtest(better, worse + better).pvalue if worse + better else 1.0
    assert compute_permutation_p_value(np.array(gaps)) == pytest.approx(expected)


def test_many_problems_give_what_large_samples_give():
    rng = np.random.default_rng(0)
    ids = [f"p{n}" for n in range(400)]
    hard = rng.uniform(size=400)
    sides = [
        {s: asked((rng.uniform(size=400) < hard + d).astype(int), None, ids) for s in range(3)}
        for d in (0.04, 0.0)
    ]
    found = compare_by_problem(*sides)["accuracy"]
    means = [np.mean([side[s].values["accuracy"] for s in range(3)], axis=0) for side in sides]
    gaps = means[0] - means[1]
    student = ttest_1samp(gaps, 0.0)
    interval = student.confidence_interval(0.95)
    assert found.mean == pytest.approx(gaps.mean())
    assert found.p == pytest.approx(student.pvalue, rel=0.15)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.002)


def test_several_answers_and_seeds_are_means_of_a_problem():
    one = {0: asked([1, 1, 0], None, ["a", "a", "b"]), 1: asked([1, 0], None, ["a", "b"])}
    other = {0: asked([0, 0, 1], None, ["a", "a", "b"]), 1: asked([1, 1], None, ["a", "b"])}
    found = compare_by_problem(one, other)["accuracy"]
    assert (found.problems, found.seeds) == (2, (0, 1))
    assert found.mean == pytest.approx(3 / 5 - 3 / 5), "as the means over answers differ"
    assert found.p == pytest.approx(1.0)
    one, other = {0: asked([1, 1, 1])}, {1: asked([0, 0, 1]), 2: asked([0, 0, 1])}
    found = compare_by_problem(one, other)["accuracy"]  # no shared seed, the same problems
    assert (found.problems, found.seeds, found.mean) == (3, (), pytest.approx(2 / 3))


def test_other_problems_give_none():
    ids = [f"q{n}" for n in range(20)]
    assert compare_by_problem({0: asked([1] * 20)}, {0: asked([0] * 20, None, ids)}) is None
    few = [f"p{n}" for n in range(8)] + ids[:12]
    assert compare_by_problem({0: asked([1] * 20)}, {0: asked([0] * 20, None, few)}) is None
    dropped = [f"p{n}" for n in range(18)]
    found = compare_by_problem({0: asked([1] * 20)}, {0: asked([0] * 18, None, dropped)})
    assert found["accuracy"].problems == 18


def test_without_confidences_accuracy_is_all():
    found = compare_by_problem({0: asked([1, 0], [0.5, 0.5])}, {0: asked([0, 0])})
    assert list(found) == ["accuracy"]
    assert EvaluationAnswers.from_payload(None) is None
    assert EvaluationAnswers.from_payload({"bins": [1]}) is None
