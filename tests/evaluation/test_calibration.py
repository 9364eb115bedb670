import json
import math
from itertools import permutations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from rows import each_row
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score

from rlx.evaluation.calibration import (
    build_reliability_bins,
    compute_aurc,
    compute_auroc,
    compute_brier,
    compute_brier_skill,
    compute_clipped_losses,
    compute_coverage_at_risk,
    compute_equal_mass_ece,
    compute_error_auprc,
    compute_expected_calibration_error,
    compute_maximum_calibration_error,
    compute_murphy_decomposition,
    compute_within_auroc,
    measure_calibration,
)

tenths = st.integers(0, 10).map(lambda k: k / 10)
pairs = st.lists(st.tuples(st.integers(0, 1), tenths | st.floats(0, 1)), min_size=1, max_size=30)


def split(pairs):
    correct, confidence = zip(*pairs, strict=True)
    return np.array(correct), np.array(confidence)


def find_ordered_risk(pairs):
    """The share of wrong answers among the first k by confidence, in one order of ties."""
    y, c = split(pairs)
    return np.cumsum(1 - y[np.argsort(-c, kind="stable")]) / np.arange(1, len(y) + 1)


@each_row("dtype", [np.float64, np.float32])
def test_every_tenth_opens_its_own_bin_and_one_closes_the_last(dtype):
    tenths = (np.arange(11) / 10).astype(dtype)
    counts = [b["n"] for b in build_reliability_bins(np.ones(11), tenths)]
    assert counts == [1] * 9 + [2]


@given(pairs)
def test_ranking_and_brier_agree_with_scikit_learn(pairs):
    y, c = split(pairs)
    assert compute_brier(y, c) == pytest.approx(brier_score_loss(y, c, pos_label=1))
    if y.min() == y.max():
        assert compute_auroc(y, c) is None
        assert compute_brier_skill(y, c) is None
    else:
        assert compute_auroc(y, c) == pytest.approx(roc_auc_score(y, c))


@given(pairs)
def test_likelihood_and_errors_found_agree_with_scikit_learn(pairs):
    y, c = split(pairs)
    kept = c.clip(0.001, 0.999)
    nll = compute_clipped_losses(y, c).mean()
    assert nll == pytest.approx(log_loss(y, kept, labels=[0, 1]))
    assert nll == pytest.approx(-np.mean(np.log(np.where(y == 1, kept, 1 - kept))))
    if y.min() == y.max():
        assert compute_error_auprc(y, c) is None
    else:
        assert compute_error_auprc(y, c) == pytest.approx(average_precision_score(1 - y, -c))


@given(pairs, st.sampled_from([1, 3, 10]))
def test_equal_mass_bins_keep_ties_together_and_know_ranks_alone(pairs, bins):
    y, c = split(pairs)
    slots = [int(bins * sum(other < own for other in c) / len(c) + 1e-12) for own in c]
    gaps = [
        (slots.count(s), np.mean([o - t for t, o, k in zip(y, c, slots, strict=True) if k == s]))
        for s in set(slots)
    ]
    ece = sum(n * abs(gap) for n, gap in gaps) / len(c)
    assert compute_equal_mass_ece(y, c, bins=bins) == pytest.approx(ece)
    assert compute_equal_mass_ece(y, c, bins=1) == pytest.approx(abs(c.mean() - y.mean()))


@given(pairs, st.sampled_from([0, 0.05, 0.1, 0.5, 1]))
def test_coverage_at_risk_is_the_best_of_all_thresholds(pairs, risk):
    y, c = split(pairs)
    kept = [c >= threshold for threshold in np.unique(c)]
    shares = [k.mean() for k in kept if (1 - y[k]).sum() <= risk * k.sum() + 1e-9]
    assert compute_coverage_at_risk(y, c, risk) == pytest.approx(max(shares, default=0))


@given(pairs, st.sampled_from([1, 4, 10, 15]))
def test_calibration_errors_agree_with_a_loop_over_the_rule(pairs, bins):
    gaps = []
    for i in range(bins):
        low, high = i / bins, (i + 1) / bins
        inside = [(y, c) for y, c in pairs if low <= c < high or (i == bins - 1 and c == 1)]
        if inside:
            gap = sum(c for _, c in inside) - sum(y for y, _ in inside)
            gaps.append((len(inside), abs(gap) / len(inside)))
    y, c = split(pairs)
    ece = sum(n * gap for n, gap in gaps) / len(pairs)
    assert sum(n for n, _ in gaps) == len(pairs)
    assert compute_expected_calibration_error(y, c, bins=bins) == pytest.approx(ece)
    assert compute_maximum_calibration_error(y, c, bins=bins) == pytest.approx(
        max(g for _, g in gaps)
    )


@given(pairs)
def test_murphy_adds_up_to_brier(pairs):
    y, c = split(pairs)
    m = compute_murphy_decomposition(y, c)
    brier = m["reliability"] - m["resolution"] + m["uncertainty"]
    assert brier == pytest.approx(compute_brier(y, c))
    assert min(m.values()) >= 0


@given(st.lists(st.tuples(st.integers(0, 1), tenths), min_size=1, max_size=6))
@settings(max_examples=25)
def test_even_ties_are_the_mean_over_all_orders(pairs):
    orders = [find_ordered_risk(order).mean() for order in permutations(pairs)]
    assert compute_aurc(*split(pairs)) == pytest.approx(np.mean(orders))


def test_an_unparsable_confidence_counts_as_the_worst_one_and_is_counted():
    missing = measure_calibration([1, 0, 1], [math.nan, math.nan, 1.0])
    worst = measure_calibration([1, 0, 1], [0.0, 1.0, 1.0])
    assert missing["unparsable"] == 2
    assert missing["readable_share"] == pytest.approx(1 / 3)
    assert {**missing, "unparsable": 0, "readable_share": 1} == worst


def test_a_policy_that_knows_only_the_stratum_is_exposed():
    correct = [1] * 8 + [0] * 2 + [1] * 2 + [0] * 8
    stratum = ["2"] * 10 + ["3"] * 10
    c = measure_calibration(correct, [0.8] * 10 + [0.2] * 10, stratum)
    assert c["ece"] == pytest.approx(0)
    assert c["auroc"] == c["stratum_auroc"] == pytest.approx(0.8)
    assert c["brier"] == pytest.approx(c["stratum_brier"])
    assert [c["by_stratum"][s]["auroc"] for s in "23"] == [0.5, 0.5] and c["within_auroc"] == 0.5
    assert c["by_stratum"]["3"]["accuracy"] == pytest.approx(0.2)
    assert c["distinct_share"] == 0.1
    assert c["entropy"] == pytest.approx(math.log(2))


@given(pairs)
def test_auroc_within_strata_counts_the_pairs_of_each(pairs):
    y, c = split(pairs)
    strata = np.arange(len(y)) % 3
    rights, wrongs = np.flatnonzero(y == 1), np.flatnonzero(y == 0)
    ranked = [
        float(c[right] > c[wrong]) + float(c[right] == c[wrong]) / 2
        for right in rights
        for wrong in wrongs
        if strata[right] == strata[wrong]
    ]
    assert compute_within_auroc(y, c, strata) == (
        pytest.approx(np.mean(ranked)) if ranked else None
    )
    assert compute_within_auroc(y, c, np.zeros(len(y))) == pytest.approx(compute_auroc(y, c))


def test_one_class_gives_none_in_plain_json():
    c = measure_calibration([1, 1], [0.2, 1.0], ["a", "b"])
    assert c["auroc"] is c["stratum_auroc"] is c["within_auroc"] is c["brier_skill"] is None
    assert json.loads(json.dumps(c, allow_nan=False)) == c


@each_row(
    ("correct", "confidence", "says"),
    [
        ([], [], "at least one"),
        ([1], [0.5, 0.5], "shape"),
        ([0.5], [0.5], "other than 0 and 1"),
        ([1], [1.2], r"has values outside \[0, 1\]"),
        ([1], [math.inf], r"has values outside \[0, 1\]"),
        ([math.nan], [0.5], "other than 0 and 1"),
    ],
)
def test_nonsense_is_refused(correct, confidence, says):
    with pytest.raises(ValueError, match=says):
        measure_calibration(correct, confidence)
