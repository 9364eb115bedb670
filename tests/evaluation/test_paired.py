"""Means over seeds, and differences between recipes."""

import math
from itertools import combinations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy import stats

from rlx.evaluation.statistics import compute_paired_difference, compute_seed_mean, correct_p_values

numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


@given(st.lists(numbers, min_size=3, max_size=9))
def test_intervals_are_those_of_scipy(values):
    found = compute_seed_mean(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    if found.std:
        low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert (found.low, found.high) == pytest.approx((low, high))


def test_one_or_two_seeds_have_no_interval():
    found = compute_seed_mean([0.25])
    assert (found.n, found.mean, found.std, found.low, found.high) == (1, 0.25, None, None, None)
    found = compute_seed_mean([0.2, 0.4])
    assert (found.low, found.high) == (None, None)
    assert found.std == pytest.approx(math.sqrt(0.02))
    assert compute_paired_difference({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.0}).low is None
    with pytest.raises(ValueError, match="no values"):
        compute_seed_mean([])


def test_no_interval_leaves_the_range_of_its_metric():
    found = compute_seed_mean([0.01, 0.02, 0.2], (0.0, 1.0))
    assert found.low == 0.0 < found.mean < found.high < 1.0
    gap = compute_paired_difference({0: 1.0, 1: 1.0, 2: 0.2}, dict.fromkeys(range(3), 0.0), (-1, 1))
    assert gap.high == 1


def test_seeds_are_matched_by_number_and_only_shared_ones_count():
    found = compute_paired_difference({0: 1.0, 1: 2.0, 7: 100.0}, {1: 1.5, 0: 0.5, 9: -100.0})
    assert found.n == 2
    assert found.mean == pytest.approx(0.5)
    assert found.p == 0.5, "two of four changes of sign"
    assert compute_paired_difference({0: 1.0}, {1: 1.0}) is None


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=6))
def test_corrected_p_values_are_those_of_the_closed_test(p_values):
    """A test is significant if every family that holds it is, by Bonferroni's rule."""
    made = [place for place, p in enumerate(p_values) if p is not None]
    families = [f for size in range(1, len(made) + 1) for f in combinations(made, size)]
    for place, corrected in enumerate(correct_p_values(p_values)):
        if p_values[place] is None:
            assert corrected is None
            continue
        of = [min(1.0, len(f) * min(p_values[i] for i in f)) for f in families if place in f]
        assert corrected == pytest.approx(max(of), abs=1e-12)
