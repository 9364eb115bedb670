"""Mismatch between sampler and learner, and the weights that make up for it."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from rows import each_row

from rlx.loss import compute_correction_weights, compute_sampler_mismatch
from rlx.spec.loss import MaskedCorrection, TruncatedCorrection

RATIOS = torch.tensor([[1.0, 4.0, 0.5, 9.0], [1.0, 0.25, 9.0, 9.0]])
"""Row 0 is worth 1 · 4 · ½ = 2, row 1 is worth ¼."""
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
SAMPLER = torch.full((2, 4), -3.0)
LEARNER = SAMPLER + RATIOS.log()

logs = st.floats(-3, 3, width=32)
rows = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.tuples(logs, st.booleans()), min_size=width, max_size=width),
        min_size=1,
        max_size=5,
    )
)
levels = st.sampled_from(["token", "sequence"])
corrections = st.builds(TruncatedCorrection, level=levels, cap=st.floats(1, 8)) | st.builds(
    MaskedCorrection, level=levels, cap=st.floats(1, 8), low=st.floats(0, 1)
)


def batch(drawn):
    """Log-ratios and mask."""
    return (
        torch.tensor([[x for x, _ in row] for row in drawn]),
        torch.tensor([[m for _, m in row] for row in drawn]),
    )


@each_row(
    ("spec", "weights", "mean", "share"),
    [
        (TruncatedCorrection(), [[1, 2, 0.5, 1], [1, 0.25, 1, 1]], 4.75 / 5, 1 / 5),
        (TruncatedCorrection(level="sequence", cap=1.5), [[1.5] * 4, [0.25] * 4], 0.875, 0.5),
        (MaskedCorrection(), [[1, 0, 0.5, 1], [1, 0.25, 1, 1]], 2.75 / 5, 1 / 5),
        (MaskedCorrection(low=0.5), [[1, 0, 0.5, 1], [1, 0, 1, 1]], 2.5 / 5, 2 / 5),
        (MaskedCorrection(low=0.5, cap=5), [[1, 4, 0.5, 1], [1, 0, 1, 1]], 6.5 / 5, 1 / 5),
        (MaskedCorrection(level="sequence", low=0.5), [[2] * 4, [0] * 4], 1.0, 0.5),
    ],
)
def test_worked_example(spec, weights, mean, share):
    found = compute_correction_weights(LEARNER, SAMPLER, MASK, spec)
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float32))
    assert found.mean == pytest.approx(mean)
    assert found.share == share


def test_mismatch_of_the_worked_example():
    found = compute_sampler_mismatch(LEARNER, SAMPLER, MASK)
    ratios = [1, 4, 0.5, 1, 0.25]
    assert found.k3 == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 5, rel=1e-6)
    assert found.ratio_max == pytest.approx(4)
    assert found.row_ratio_max == pytest.approx(2)


def test_a_ratio_on_a_bound_is_within_it():
    same, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for spec in (TruncatedCorrection(cap=1), MaskedCorrection(low=1, cap=1)):
        found = compute_correction_weights(same, same, mask, spec)
        assert (found.weights.tolist(), found.mean, found.share) == ([[1.0, 1.0]], 1.0, 0.0)


def test_a_tiny_mismatch_is_not_lost_in_rounding():
    learner = torch.full((1, 1), -2.0)
    found = compute_sampler_mismatch(learner, learner - 2**-20, torch.ones(1, 1, dtype=torch.bool))
    assert found.k3 == pytest.approx(2**-41, rel=0.2)


def test_without_a_token_there_is_no_mismatch_and_nothing_to_correct():
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    assert compute_sampler_mismatch(LEARNER, SAMPLER, nothing) is None
    found = compute_correction_weights(
        LEARNER, SAMPLER, nothing, TruncatedCorrection(level="sequence")
    )
    assert torch.equal(found.weights, torch.ones(2, 4))
    assert (found.mean, found.share) == (0, 0)


@given(rows, corrections)
def test_where_the_policies_agree_every_weight_is_exactly_one(drawn, spec):
    logprobs, mask = batch(drawn)
    found = compute_correction_weights(logprobs, logprobs, mask, spec)
    assert torch.equal(found.weights, torch.ones_like(logprobs))
    assert found.share == 0


@given(rows, corrections)
def test_weights_agree_with_a_plain_loop(drawn, spec):
    log_ratio, mask = batch(drawn)
    learner = (log_ratio - 4).requires_grad_()
    found = compute_correction_weights(learner, torch.full_like(log_ratio, -4), mask, spec)
    assert not found.weights.requires_grad
    for b, row in enumerate(drawn):
        own = [x for x, learns in row if learns]
        for t, (x, learns) in enumerate(row):
            if spec.level == "sequence":
                learns, x = bool(own), sum(own)
            w = math.exp(x) if learns else 1.0
            if learns and spec.kind == "truncate":
                w = min(w, spec.cap)
            elif learns and not spec.low <= w <= spec.cap:
                w = 0.0
            edges = (spec.cap, getattr(spec, "low", spec.cap))
            if all(abs(math.exp(x) - edge) > 1e-3 for edge in edges):
                assert found.weights[b, t].item() == pytest.approx(w, rel=1e-4)


@given(rows, corrections, st.floats(-9, 9))
def test_what_stands_outside_the_mask_changes_nothing(drawn, spec, noise):
    log_ratio, mask = batch(drawn)
    sampler = torch.full_like(log_ratio, -4)
    elsewhere = torch.where(mask, sampler, torch.tensor(noise, dtype=torch.float32))
    clean, noisy = (
        compute_correction_weights(log_ratio - 4, s, mask, spec) for s in (sampler, elsewhere)
    )
    assert torch.equal(clean.weights, noisy.weights)
    assert compute_sampler_mismatch(log_ratio - 4, sampler, mask) == compute_sampler_mismatch(
        log_ratio - 4, elsewhere, mask
    )


@each_row("log_ratio", [100.0, -100.0, math.inf, -math.inf])
@each_row("level", ["token", "sequence"])
def test_policies_that_have_nothing_in_common_still_give_numbers(log_ratio, level):
    learner, mask = torch.tensor([[log_ratio]]), torch.ones(1, 1, dtype=torch.bool)
    spec = TruncatedCorrection(level=level)
    assert (
        compute_correction_weights(learner, torch.zeros(1, 1), mask, spec).weights.isfinite().all()
    )
    found = compute_sampler_mismatch(learner, torch.zeros(1, 1), mask)
    assert math.isfinite(found.k3) and math.isfinite(found.ratio_max)
