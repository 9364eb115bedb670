"""Estimators over one score per rollout: worked examples, plain loops as oracles, relations."""

from functools import partial
from statistics import mean, stdev

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rlx.credit.group import group_advantages
from rlx.credit.outcome import (
    compute_gpg_advantages,
    compute_opo_advantages,
    compute_pass_at_k_advantages,
    compute_remax_advantages,
    compute_rloo_advantages,
)

# Sixteenths: sums are exact, so ties and equal groups are what they seem.
scores_of_a_group = st.lists(st.integers(-48, 48).map(lambda n: n / 16), min_size=1, max_size=6)
groups = st.lists(scores_of_a_group, min_size=1, max_size=5)
rows = groups.flatmap(
    lambda groups: st.permutations(
        [(score, 7 * n - 3) for n, group in enumerate(groups) for score in group]
    )
)
close = partial(pytest.approx, rel=1e-9, abs=1e-9)


def near(expected):
    return pytest.approx(expected, rel=1e-6, abs=1e-9)


def tensors(rows, dtype=torch.float64):
    return torch.tensor([s for s, _ in rows], dtype=dtype), torch.tensor([g for _, g in rows])


def lengths_of(rows):
    """Some lengths, a row's own wherever it lies; some are 0."""
    return torch.tensor([int(16 * s + 3 * g) % 7 for s, g in rows])


# Worked examples ----------------------------------------------------------------------------------

ESTIMATORS = {
    "grpo": lambda s, g, _: group_advantages(s, g),
    "dr_grpo": lambda s, g, _: group_advantages(s, g, normalize="center"),
    "rloo": lambda s, g, _: compute_rloo_advantages(s, g),
    "rloo_explicit": lambda s, g, _: compute_rloo_advantages(s, g),
    "opo": lambda s, g, given: compute_opo_advantages(s, torch.tensor(given["lengths"]), g),
    "remax": lambda s, _, given: compute_remax_advantages(
        s, torch.full_like(s, given["greedy_baseline"])
    ),
    "gpg": lambda s, g, _: compute_gpg_advantages(s, g),
    "grpo_passk": lambda s, g, _: compute_pass_at_k_advantages(s, g),
}


# Plain loops --------------------------------------------------------------------------------------


def leave_one_out(row, group, everything):
    others = [other["score"] for other in group if other is not row]
    return row["score"] - mean(others)


def by_length(row, group, everything):
    tokens = sum(other["length"] for other in group)
    if tokens == 0:
        return row["score"] - mean(other["score"] for other in group)
    return row["score"] - sum(other["length"] * other["score"] for other in group) / tokens


def by_nonzero_scores(row, group, everything):
    nonzero = [other for other in everything if other["score"] != 0] or [None]
    centre = mean(other["score"] for other in group)
    return len(everything) / len(nonzero) * (row["score"] - centre) / 2


def by_groups_with_signal(row, group, everything):
    found = {}
    for other in everything:
        found.setdefault(other["group"], set()).add(other["score"])
    valid = [scores for scores in found.values() if len(scores) > 1] or [None]
    return len(found) / len(valid) * (row["score"] - mean(other["score"] for other in group))


def the_best_alone(row, group, everything):
    best, second = sorted((other["score"] for other in group), reverse=True)[:2]
    if row["score"] < best or best == second:
        return 0.0
    return (best - second) / (stdev(other["score"] for other in group) + 1e-6)


FAMILY = [
    pytest.param(lambda s, g, n: compute_rloo_advantages(s, g), leave_one_out, id="rloo"),
    pytest.param(lambda s, g, n: compute_opo_advantages(s, n, g), by_length, id="opo"),
    pytest.param(
        lambda s, g, n: compute_gpg_advantages(s, g, f_norm=2.0), by_nonzero_scores, id="gpg-scores"
    ),
    pytest.param(
        lambda s, g, n: compute_gpg_advantages(s, g, alpha="groups"),
        by_groups_with_signal,
        id="gpg-groups",
    ),
    pytest.param(
        lambda s, g, n: compute_pass_at_k_advantages(s, g), the_best_alone, id="pass_at_k"
    ),
]


@pytest.mark.parametrize(("estimator", "oracle"), FAMILY)
@settings(deadline=None)
@given(rows=rows)
def test_agrees_with_a_plain_loop_whatever_the_groups_and_the_order(estimator, oracle, rows):
    lengths = lengths_of(rows)
    everything = [
        {"score": s, "group": g, "length": int(n)} for (s, g), n in zip(rows, lengths, strict=True)
    ]
    expected = []
    for row in everything:
        group = [other for other in everything if other["group"] == row["group"]]
        expected.append(oracle(row, group, everything) if len(group) > 1 else 0.0)
    assert estimator(*tensors(rows), lengths).tolist() == close(expected)


@pytest.mark.parametrize(("estimator", "oracle"), FAMILY)
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(1, 40)), min_size=1, max_size=5)
)
def test_equal_scores_are_exactly_zero_and_float32_stays_float32(estimator, oracle, groups):
    rows = [(score, n) for n, (score, size) in enumerate(groups) for _ in range(size)]
    actual = estimator(*tensors(rows, torch.float32), torch.arange(len(rows)))
    assert actual.dtype == torch.float32
    assert actual.tolist() == [0.0] * len(rows)


# Relations ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(rows)
def test_rloo_is_centring_times_n_over_n_minus_one(rows):
    scores, ids = tensors(rows)
    centred = group_advantages(scores, ids, normalize="center")
    sizes = (ids[:, None] == ids).sum(dim=1)
    expected = torch.where(sizes > 1, sizes / (sizes - 1.0), 1.0) * centred
    torch.testing.assert_close(
        compute_rloo_advantages(scores, ids), expected, rtol=1e-6, atol=1e-12
    )


@settings(deadline=None)
@given(rows, st.integers(0, 9))
def test_opo_with_equal_lengths_is_centring(rows, length):
    scores, ids = tensors(rows)
    expected = group_advantages(scores, ids, normalize="center")
    torch.testing.assert_close(
        compute_opo_advantages(scores, torch.full_like(ids, length), ids), expected
    )


@settings(deadline=None)
@given(rows)
def test_opo_sums_to_zero_over_the_tokens_of_a_group(rows):
    scores, ids = tensors(rows)
    lengths = lengths_of(rows) + 1
    per_group = torch.zeros(100, dtype=torch.float64)
    per_group = per_group.index_add(
        0, ids + 3, lengths * compute_opo_advantages(scores, lengths, ids)
    )
    torch.testing.assert_close(per_group, torch.zeros_like(per_group), rtol=0, atol=1e-9)


def test_gpg_is_centring_when_every_score_is_a_signal():
    scores, ids = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([5, 1, 5, 1])
    expected = group_advantages(scores, ids, normalize="center")
    for alpha in ("scores", "groups"):
        torch.testing.assert_close(compute_gpg_advantages(scores, ids, alpha=alpha), expected)


def test_gpg_makes_up_for_groups_without_signal():
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    assert compute_gpg_advantages(scores, ids).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert compute_gpg_advantages(scores, ids, alpha="groups").tolist() == [
        1.5,
        -1.5,
        0.0,
        0.0,
        0.0,
        0.0,
    ]


def test_two_best_rows_teach_pass_at_k_nothing():
    scores, ids = torch.tensor([1.0, 1.0, 0.0, 0.5]), torch.tensor([2, 2, 2, 9])
    assert compute_pass_at_k_advantages(scores, ids).tolist() == [0.0] * 4
    scores = torch.tensor([1.0, 0.75, 0.0, 0.5])
    assert compute_pass_at_k_advantages(scores, ids, normalize="center").tolist() == [
        0.25,
        0.0,
        0.0,
        0.0,
    ]


@settings(deadline=None)
@given(rows)
def test_remax_against_the_group_mean_is_centring(rows):
    scores, ids = tensors(rows)
    centred = group_advantages(scores, ids, normalize="center")
    torch.testing.assert_close(compute_remax_advantages(scores, scores - centred), centred)


@pytest.mark.parametrize(
    ("estimator", "raw"),
    [
        (compute_rloo_advantages, 0.9),
        (lambda s, g, **how: compute_opo_advantages(s, torch.tensor([3, 1, 2]), g, **how), 0.9),
        (lambda s, g, **how: compute_gpg_advantages(s, g, **how), 1.35),
        (lambda s, g, **how: compute_gpg_advantages(s, g, alpha="groups", **how), 0.9),
    ],
)
def test_a_group_of_one_is_zero_or_its_raw_score(estimator, raw):
    scores = torch.tensor([0.9, 1.0, 0.0], dtype=torch.float64)
    ids = torch.tensor([8, 4, 4])
    assert estimator(scores, ids)[0] == 0.0
    assert estimator(scores, ids, singleton="raw")[0].item() == close(raw)
    assert (estimator(scores, ids)[1:] != 0).all()
