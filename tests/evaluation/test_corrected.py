"""What flatters a calibration figure: few answers per bin, one bit, and what a map could mend."""

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.isotonic import IsotonicRegression

from rlx.evaluation.calibration import (
    compute_auroc,
    compute_debiased_ece,
    compute_expected_calibration_error,
    compute_one_bit_auroc,
    compute_recalibrated_brier,
    halve_problems,
    recalibrate_confidences,
)


def answers(n, seed=0, gap=0.0):
    """Confidences on a grid of .05, and labels with that probability less a gap."""
    draw = np.random.default_rng(seed)
    stated = draw.integers(2, 20, n) / 20
    return (draw.random(n) < stated - gap).astype(float), stated


def test_the_correction_is_that_of_a_folded_normal_by_hand():
    correct = [1.0] * 6 + [0.0] * 4
    gap, noise = 0.75 - 0.6, np.sqrt(0.6 * 0.4 / 10)
    outcomes = norm(gap, noise)
    grid = np.linspace(-8, 8, 200_001) * noise + gap
    expected_gap = np.trapezoid(np.abs(grid) * outcomes.pdf(grid), grid)
    found = compute_debiased_ece(correct, [0.75] * 10)
    assert found == pytest.approx(2 * gap - expected_gap, abs=1e-6)
    assert compute_expected_calibration_error(correct, [0.75] * 10) == pytest.approx(gap)
    assert compute_debiased_ece([1.0] * 5, [0.8] * 5) == pytest.approx(0.2), "one outcome: as it is"


def test_a_confidence_of_two_values_is_one_bit_and_a_graded_one_is_not():
    correct, stated = answers(4000)
    bit = np.where(stated >= 0.5, 0.9, 0.1)
    assert compute_one_bit_auroc(correct, bit) == compute_auroc(correct, bit)
    assert compute_one_bit_auroc(correct, stated) == compute_auroc(correct, bit)
    assert compute_auroc(correct, stated) > compute_one_bit_auroc(correct, stated) + 0.02
    assert compute_one_bit_auroc([1, 1], [0.2, 0.9]) is None


def test_each_half_gets_the_map_that_scikit_learn_fits_on_the_other():
    correct, stated = answers(300)
    problems = [str(i // 3) for i in range(300)]
    half = halve_problems(problems)
    expected = np.zeros(300)
    for test in (half, ~half):
        fit = IsotonicRegression(out_of_bounds="clip").fit(stated[~test], correct[~test])
        expected[test] = fit.predict(stated[test])
    np.testing.assert_allclose(recalibrate_confidences(correct, stated, problems), expected)


def test_the_map_is_fitted_on_other_problems():
    """One problem is always right at .2 and one always wrong at .8: no other problem shows it."""
    correct, stated = [1.0] * 4 + [0.0] * 4, [0.2] * 4 + [0.8] * 4
    halves = ["a"] * 4 + ["d"] * 4
    assert halve_problems(halves).tolist() in ([True] * 4 + [False] * 4, [False] * 4 + [True] * 4)
    assert compute_recalibrated_brier(correct, stated, halves) == 1.0
    assert compute_recalibrated_brier(correct, stated) == 0.25, "half of each problem shows it"
    assert compute_recalibrated_brier([1, 0], [0.5, 0.5], ["a", "a"]) is None
