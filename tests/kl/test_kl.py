"""KL per token: worked examples, relations between estimators, and exact gradients by enumeration.

A categorical over five actions is small enough to sum over: no sampling, no tolerance for noise.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from rows import each_row

from rlx.kl import CLAMP, KlCoefficient, kl_terms, mean_kl, subtract_kl_penalty
from rlx.learner.learner import UpdateSums, UpdateTargets, policy_term
from rlx.spec import KlPenalty, LossSpec

SAME = [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")]
KINDS = ["k1", "abs", "k2", "k3"]

logprob = st.floats(-20, 0)
pairs = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=20)


def near(expected, rel=1e-6, absolute=1e-9):
    return pytest.approx(expected, rel=rel, abs=absolute)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def columns(pairs):
    return (double(column) for column in zip(*pairs, strict=True))


@given(pairs)
def test_every_name_of_the_sources_is_one_of_four_estimators(pairs):
    policy, reference = columns(pairs)
    for ours, theirs in SAME:
        assert torch.equal(kl_terms(policy, reference, ours), kl_terms(policy, reference, theirs))


@given(pairs)
def test_agrees_with_plain_arithmetic(pairs):
    def oracle(kind, p, q):
        x = p - q
        inside = min(max(-x, -5), 5)
        return {
            "k1": x,
            "abs": abs(x),
            "k2": x * x / 2,
            "k3": math.exp(inside) - inside - 1,
        }[kind]

    policy, reference = columns(pairs)
    for kind in KINDS:
        expected = [oracle(kind, p, q) for p, q in pairs]
        assert kl_terms(policy, reference, kind).tolist() == near(expected, 1e-9, 1e-12)


@given(st.floats(1e-4, 1e-2), st.sampled_from([-1, 1]))
def test_near_the_reference_k3_is_k2_even_in_float32(size, sign):
    reference = torch.zeros(1)
    policy = torch.tensor([sign * size])
    k2, k3 = (kl_terms(policy, reference, kind).item() for kind in ("k2", "k3"))
    assert k3 == near(k2, rel=size, absolute=1e-10)


@each_row("x", [CLAMP, 6.0, 300.0])
def test_k3_stays_finite_however_far_the_policies_are_apart(x):
    assert kl_terms(torch.zeros(1), torch.tensor([x]), "k3").item() == near(math.exp(5) - 6)
    assert kl_terms(torch.zeros(1), torch.tensor([-x]), "k3").item() == near(math.exp(-5) + 4)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="kind is 'full', not k1"):
        kl_terms(torch.zeros(1), torch.zeros(1), "full")


logits = st.lists(st.floats(-1.2, 1.2), min_size=5, max_size=5)  # x stays within the clamp of k3


def expected_value_and_gradient(policy_logits, reference_logits, kind):
    """E over actions drawn from the policy; the draw itself is not differentiated, as in a loss."""
    theta = double(policy_logits).requires_grad_()
    logp, logq = theta.log_softmax(0), double(reference_logits).log_softmax(0)
    value = (logp.exp().detach() * kl_terms(logp, logq, kind)).sum()
    (gradient,) = torch.autograd.grad(value, theta)
    return value.item(), gradient.tolist()


def exact(policy_logits, reference_logits, *, reverse):
    """KL(π‖π_ref) if reverse, else KL(π_ref‖π), and its gradient by the policy's logits."""
    theta = double(policy_logits).requires_grad_()
    logp, logq = theta.log_softmax(0), double(reference_logits).log_softmax(0)
    one, other = (logp, logq) if reverse else (logq, logp)
    value = (one.exp() * (one - other)).sum()
    (gradient,) = torch.autograd.grad(value, theta)
    return value.item(), gradient.tolist()


@given(logits, logits)
def test_as_a_loss_k1_stands_still_k2_descends_kl_and_k3_the_other_kl(policy, reference):
    gradients = {
        kind: expected_value_and_gradient(policy, reference, kind)[1] for kind in ("k1", "k2", "k3")
    }
    assert gradients["k1"] == near([0.0] * 5, 0, 1e-12)
    assert gradients["k2"] == near(exact(policy, reference, reverse=True)[1], 1e-9, 1e-12)
    assert gradients["k3"] == near(exact(policy, reference, reverse=False)[1], 1e-9, 1e-12)


@given(logits, logits)
def test_as_a_loss_abs_descends_total_variation(policy, reference):
    theta = double(policy).requires_grad_()
    distance = (theta.softmax(0) - double(reference).softmax(0)).abs()
    assume(distance.min() > 1e-9)  # where they touch, the absolute value has a kink
    (gradient,) = torch.autograd.grad(distance.sum(), theta)
    actual = expected_value_and_gradient(policy, reference, "abs")[1]
    assert actual == near(gradient.tolist(), 1e-9, 1e-12)


def test_beyond_its_clamp_k3_has_no_gradient():
    policy = torch.tensor([-7.0, -1.0, 5.5], requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_terms(policy, torch.zeros(3), "k3").sum(), policy)
    assert (gradient != 0).tolist() == [False, True, False]


token = st.tuples(st.floats(-5, 5), logprob, logprob, st.booleans())
token_rows = st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4)


def batch(rows, padding=0, garbage=math.nan):
    """Rewards, old and reference logprobs, mask; `garbage` wherever the mask is off."""
    width = max(map(len, rows)) + padding
    columns_ = [torch.full((len(rows), width), garbage, dtype=torch.float64) for _ in range(3)]
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        for t, (*values, learns) in enumerate(row):
            mask[number, t] = learns
            for column, value in zip(columns_, values, strict=True):
                column[number, t] = value if learns else garbage
    return (*columns_, mask)


@given(token_rows, st.sampled_from(KINDS), st.floats(0, 1), st.integers(0, 2))
def test_kl_in_reward_reads_and_writes_the_mask_alone(rows, kind, beta, padding):
    rewards, old, reference, mask = batch(rows, padding)
    actual = subtract_kl_penalty(rewards, old, reference, mask, beta=beta, kind=kind)
    for number, row in enumerate(rows):
        for t, (r, p, q, learns) in enumerate(row):
            term = kl_terms(double([p]), double([q]), kind).item()
            assert actual[number, t].item() == near(r - beta * term if learns else 0, 1e-12, 1e-12)
    assert (actual[~mask] == 0).all()


@given(token_rows, st.randoms(use_true_random=False), st.integers(0, 2))
def test_mean_kl_is_a_mean_over_rows_that_have_tokens(rows, random, padding):
    means = [
        sum(r for r, *_, learns in row if learns) / count
        for row in rows
        if (count := sum(learns for *_, learns in row))
    ]
    terms, _, _, mask = batch(random.sample(rows, len(rows)), padding)
    expected = sum(means) / len(means) if means else math.nan
    assert mean_kl(terms, mask).item() == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_a_fixed_coefficient_stays():
    assert KlCoefficient(beta=0.05).update(9.0, 64) == KlCoefficient(beta=0.05)


@given(st.floats(-1, 100), st.integers(1, 500))
def test_beta_rises_above_the_target_falls_below_it_and_never_jumps(current, steps):
    before = KlCoefficient(beta=0.2, target=0.1, horizon=1000)
    after = before.update(current, steps)
    assert (after.beta > before.beta) == (current > before.target) or after.beta == near(0.2)
    assert abs(after.beta / before.beta - 1) <= 0.2 * steps / 1000 + 1e-12
    assert before.update(before.target, steps) == before


def test_beta_moves_by_its_error_times_the_samples_over_the_horizon():
    before = KlCoefficient(beta=0.5, target=0.1, horizon=1000)
    found = [before.update(kl, steps).beta for kl, steps in ((0.11, 100), (0.09, 50), (9.0, 100))]
    assert found == near([0.505, 0.4975, 0.51])  # .5 · (1 + .1 · .1), (1 - .1 · .05), (1 + .2 · .1)


def test_a_kl_that_is_nan_moves_no_coefficient_silently():
    with pytest.raises(ValueError, match="current_kl is NaN"):
        KlCoefficient(beta=0.2, target=0.1, horizon=10).update(math.nan, 1)


STUDENT, TEACHER = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]
EXACT_KL = 0.21801  # .5 ln 2 + .3 ln 1.2 + .2 ln .4
TO_TEACHER = [0.23757, -0.01071, -0.22686]  # π · (ln(π / q) - KL), the gradient by the logits
FROM_TEACHER = [0.25, 0.05, -0.3]  # π - q, that of KL(q ‖ π)


@each_row(
    ("kind", "coefficient", "gradient"),
    [
        ("k1", 1.0, [0.0, 0.0, 0.0]),
        ("k2", 1.0, TO_TEACHER),
        ("k2", 2.0, [2 * g for g in TO_TEACHER]),
        ("k3", 1.0, FROM_TEACHER),
    ],
)
def test_without_rewards_the_loss_descends_the_exact_kl_to_the_teacher(kind, coefficient, gradient):
    """Every action once, with its probability as its weight: an expectation without sampling."""
    theta = double(STUDENT).log().requires_grad_()
    logprobs, nothing = theta.log_softmax(0), torch.zeros(3, dtype=torch.float64)
    targets = UpdateTargets(
        rows=torch.arange(3),
        old=logprobs.detach(),
        advantages=nothing,
        weights=double(STUDENT),
        bonus=nothing,
        reference=double(TEACHER).log(),
    )
    spec, sums = LossSpec(kl=KlPenalty(coefficient=coefficient, kl_penalty=kind)), UpdateSums()
    policy_term(logprobs, nothing, targets, spec, sums).backward()
    assert theta.grad.tolist() == near(gradient, 0, 1e-5)
    sums.read_kept()
    if kind in ("k1", "k3"):
        assert sums.totals["kl_loss"] == near(EXACT_KL, 0, 1e-5)
