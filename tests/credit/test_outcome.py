"""Estimators over one score per rollout: worked examples, plain loops as oracles, relations."""

from functools import partial
from statistics import mean, stdev

import bound
import hypothesis.strategies as st
import pytest
import torch
from golden_records import build_credit_inputs
from hypothesis import given
from rows import each_row

# Sixteenths: sums are exact, so ties and equal groups are what they seem.
scores_of_a_group = st.lists(st.integers(-48, 48).map(lambda n: n / 16), min_size=1, max_size=6)
groups = st.lists(scores_of_a_group, min_size=1, max_size=5)
rows = groups.flatmap(
    lambda groups: st.permutations(
        [(score, 7 * n - 3) for n, group in enumerate(groups) for score in group]
    )
)
close = partial(pytest.approx, rel=1e-9, abs=1e-9)


def tensors(rows, dtype=torch.float64):
    return torch.tensor([s for s, _ in rows], dtype=dtype), torch.tensor([g for _, g in rows])


def lengths_of(rows):
    """Some lengths, a row's own wherever it lies; some are 0."""
    return torch.tensor([int(16 * s + 3 * g) % 7 for s, g in rows])


def estimate(name, scores, ids, lengths=None, *, greedy_scores=None, **options):
    """`[B]` advantage of each row, from `[B]` scores; a row has one token, or as many as given."""
    lengths = torch.ones_like(ids) if lengths is None else lengths
    mask = torch.arange(int(lengths.max()) + 1) < lengths[:, None]
    inputs = build_credit_inputs(
        {
            "turn_rewards": scores.new_zeros(len(scores), 0),
            "global_rewards": scores,
            "group_ids": ids,
            "mask": mask,
            "greedy_scores": greedy_scores,
        }
    )
    advantages = bound.estimator(name, **options)(inputs)
    assert (advantages == torch.where(mask, advantages[:, :1], 0.0)).all()
    return advantages[:, 0]


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


def by_success(row, group, everything):
    centre = mean(other["score"] for other in group)
    return (row["score"] - centre) / (centre + 1e-6) if centre > 0 else 0.0


def the_best_alone(row, group, everything):
    best, second = sorted((other["score"] for other in group), reverse=True)[:2]
    if row["score"] < best or best == second:
        return 0.0
    return (best - second) / (stdev(other["score"] for other in group) + 1e-6)


FAMILY = [
    pytest.param(partial(estimate, "rloo"), leave_one_out, id="rloo"),
    pytest.param(partial(estimate, "opo"), by_length, id="opo"),
    pytest.param(
        partial(estimate, "gpg", alpha="scores", f_norm=2.0), by_nonzero_scores, id="gpg-scores"
    ),
    pytest.param(partial(estimate, "gpg", alpha="groups"), by_groups_with_signal, id="gpg-groups"),
    pytest.param(partial(estimate, "maxrl"), by_success, id="maxrl"),
    pytest.param(partial(estimate, "pass_at_k"), the_best_alone, id="pass_at_k"),
]


@each_row(("estimator", "oracle"), FAMILY)
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
    learns = [int(n > 0) for n in lengths]
    expected = [a * some for a, some in zip(expected, learns, strict=True)]
    assert estimator(*tensors(rows), lengths).tolist() == close(expected)


def gdpo(values, ids, weights, mask=None, **options):
    rewards = torch.tensor(values, dtype=torch.float64)
    given = {"named_rewards": rewards, "reward_weights": weights, "group_ids": torch.tensor(ids)}
    if mask is not None:
        given["mask"] = torch.tensor(mask, dtype=torch.bool)
    return bound.estimator("gdpo", **options)(build_credit_inputs(given))


named = st.lists(
    st.tuples(*[st.none() | st.integers(-16, 16).map(lambda n: n / 16)] * 2, st.integers(0, 2)),
    min_size=1,
    max_size=9,
)


@given(named, st.sampled_from([0, 1]))
def test_gdpo_agrees_with_a_plain_loop_and_an_absent_reward_is_no_zero(rows, ddof):
    weights, ids = (2.0, -0.5), [group for *_, group in rows]
    sums = [0.0] * len(rows)
    for column, weight in enumerate(weights):
        for i, row in enumerate(rows):
            group = [r[column] for r in rows if r[2] == row[2] and r[column] is not None]
            if row[column] is None or max(group) == min(group):
                continue
            centre = mean(group)
            sigma = (sum((x - centre) ** 2 for x in group) / (len(group) - ddof)) ** 0.5
            sums[i] += weight * (row[column] - centre) / (sigma + 1e-4)
    values = [[float("nan") if v is None else v for v in row[:2]] for row in rows]
    how = {"ddof": ddof, "eps": 1e-4}
    found = gdpo(values, ids, weights, renormalize="none", **how)[:, 0]
    assert found.tolist() == pytest.approx(sums, abs=1e-9)
    spread = len(rows) > ddof and (sum(s * s for s in sums) / (len(rows) - ddof)) ** 0.5
    if spread and spread > 1e-6:
        scaled = gdpo(values, ids, weights, **how)[:, 0].tolist()
        assert scaled == pytest.approx([s / (spread + 1e-4) for s in sums], abs=1e-8)


def test_gdpo_tells_apart_what_a_sum_confuses():
    """Two rewards, 1 + 0 and 0 + 1: their sums are equal, and GRPO would learn nothing."""
    values = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    assert (gdpo(values, [0] * 4, (1.0, 1.0)) == 0).all()  # the deviations are equal too
    advantages = gdpo(values, [0] * 4, (1.0, 0.5))[:, 0]
    assert advantages[0] > 0 > advantages[1]


def test_the_only_row_with_a_token_is_its_own_baseline_of_opo():
    scores, ids = torch.tensor([1.0, 0.0]), torch.tensor([3, 3])
    assert estimate("opo", scores, ids, torch.tensor([1, 0])).tolist() == [0.0, 0.0]


def test_two_best_rows_teach_pass_at_k_nothing():
    scores, ids = torch.tensor([1.0, 1.0, 0.0, 0.5]), torch.tensor([2, 2, 2, 9])
    assert estimate("pass_at_k", scores, ids).tolist() == [0.0] * 4
    scores = torch.tensor([1.0, 0.75, 0.0, 0.5])
    assert estimate("pass_at_k", scores, ids, normalize="center").tolist() == [
        0.25,
        0.0,
        0.0,
        0.0,
    ]


@each_row(
    ("estimator", "raw"),
    [
        (partial(estimate, "rloo"), 0.9),
        (partial(estimate, "opo", lengths=torch.tensor([3, 1, 2])), 0.9),
        (partial(estimate, "maxrl"), 0.9),
        (partial(estimate, "gpg", alpha="scores"), 1.35),
        (partial(estimate, "gpg", alpha="groups"), 0.9),
    ],
)
def test_a_group_of_one_is_zero_or_its_raw_score(estimator, raw):
    scores = torch.tensor([0.9, 1.0, 0.0], dtype=torch.float64)
    ids = torch.tensor([8, 4, 4])
    assert estimator(scores, ids)[0] == 0.0
    assert estimator(scores, ids, singleton="raw")[0].item() == close(raw)
    assert (estimator(scores, ids)[1:] != 0).all()
