"""Surrogates and masks that other libraries have: plain loops as oracles, and relations."""

import math
from statistics import mean

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from rows import each_row

from rlx.loss import (
    clip_log_ratio,
    clipped_surrogate,
    compute_dppo_loss,
    compute_sapo_loss,
    compute_token_covariances,
    compute_token_losses,
    draw_covariant_tokens,
    find_close_sequences,
    find_largest_covariances,
    find_near_tokens,
)
from rlx.spec import ClipCovariance, KlCovariance, LossSpec

tokens = st.lists(
    st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01), st.floats(-3, 3)), min_size=1, max_size=10
)
"""Log-probability, old log-probability and advantage."""
SURROGATES = ["clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "log_clip", "none"]
RATIOS = ["token", "sequence", "sequence_token"]


def columns(tokens):
    return torch.tensor(tokens, dtype=torch.float64).unbind(dim=1)


def near(expected):
    return pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(tokens, st.floats(0.2, 4), st.floats(0.2, 4))
def test_sapo_is_a_gate_whose_gradient_fades_on_both_sides(tokens, positive, negative):
    new, old, advantages = columns(tokens)
    new.requires_grad_()
    losses = compute_sapo_loss(new - old, advantages, temperatures=(positive, negative))
    losses.sum().backward()
    for n, (x, y, a) in enumerate(tokens):
        tau, ratio = positive if a > 0 else negative, math.exp(x - y)
        gate = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700)))
        assert losses[n].item() == near(-4 / tau * gate * a)
        assert new.grad[n].item() == near(-4 * gate * (1 - gate) * ratio * a)


def binary(divergence, p, q):
    """Divergence of "this token" from "any other"."""
    if divergence == "tv":
        return abs(p - q)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))


@given(tokens, st.sampled_from(["tv", "kl"]), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_dppo_leaves_out_what_would_go_on_leaving(tokens, divergence, low, high):
    new, old, advantages = columns(tokens)
    new.requires_grad_()
    how = {"divergence": divergence, "bounds": (low, high)}
    compute_dppo_loss(new, old, advantages, **how, cap=5.0).sum().backward()
    for n, (x, y, a) in enumerate(tokens):
        p, q = math.exp(x), math.exp(y)
        distance, leaving = binary(divergence, p, q), (p - q) * (1 if a > 0 else -1) > 0
        if leaving and abs(distance - (high if a > 0 else low)) < 1e-9:
            continue
        far = leaving and distance > (high if a > 0 else low)
        assert new.grad[n].item() == near(0.0 if far else -min(p / q, 5.0) * a)


def test_dppo_keeps_a_token_that_was_certain_and_moved_little():
    new, old = torch.tensor([-0.01]), torch.tensor([0.0])
    how = {"divergence": "kl", "bounds": (0.05, 0.05)}
    assert find_near_tokens(new, old, torch.tensor([-1.0]), **how).tolist() == [True]


@given(tokens, st.floats(0.01, 0.9), st.floats(0.01, 0.9))
def test_a_clipped_log_ratio_is_the_clip_of_ppo_in_logarithms(tokens, low, high):
    new, old, advantages = columns(tokens)
    bounded = clip_log_ratio(new - old, advantages, clip=(low, high))
    bounds = (1 - math.exp(-low), math.exp(high) - 1)
    expected = clipped_surrogate(new - old, advantages, clip=bounds, dual_clip=None)
    torch.testing.assert_close(-bounded.exp() * advantages, expected)


def test_a_token_without_advantage_has_no_log_ratio():
    log_ratio, advantages = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0.0, 0.0, 1.0])
    assert clip_log_ratio(log_ratio, advantages, clip=(0.25, 0.5)).tolist() == [0.0, 0.0, 0.5]


batches = st.lists(
    st.tuples(st.floats(-4, -0.1), st.floats(-4, -0.1), st.integers(0, 3)), min_size=1, max_size=12
)


def drawn(batch):
    """Log-probabilities with gradient, old ones, rows, and an advantage per row."""
    new, old, rows = columns(batch)
    rows = rows.long()
    return new.requires_grad_(), old, torch.tensor([1.5, -0.5, 0.25, -2.0]).double()[rows], rows


@given(batches)
def test_log_clip_with_a_ratio_per_sequence_is_gmpo(batch):
    new, old, advantages, rows = drawn(batch)
    spec = LossSpec(surrogate="log_clip", ratio="sequence", clip=(0.3, 0.4))
    losses = compute_token_losses(new, old, advantages, rows, spec).losses
    for row in set(rows.tolist()):
        own = [n for n in range(len(batch)) if rows[n] == row]
        a = advantages[own[0]].item()
        logs = [batch[n][0] - batch[n][1] for n in own]
        kept = [min(x, 0.4) if a > 0 else max(x, -0.3) for x in logs]
        assert losses[own].tolist() == near([-math.exp(mean(kept)) * a] * len(own))


@given(batches)
def test_a_ratio_of_sequence_and_token_has_the_value_of_one_and_the_gradient_of_the_other(batch):
    new, old, advantages, rows = drawn(batch)
    # Token advantages: where a row has but one, both gradients add up to the same.
    advantages = advantages * torch.arange(1, len(batch) + 1)
    found, wanted = (
        compute_token_losses(
            new, old, advantages, rows, LossSpec(surrogate="none", ratio=ratio)
        ).losses
        for ratio in ("sequence_token", "sequence")
    )
    torch.testing.assert_close(found, wanted)
    (gradient,) = torch.autograd.grad(found.sum(), new)
    torch.testing.assert_close(gradient, found.detach())


@given(batches, st.floats(0.0, 2.0))
def test_rows_far_from_the_old_policy_lose_their_negative_tokens(batch, bound):
    new, old, advantages, rows = drawn(batch)
    close = find_close_sequences(new - old, advantages, rows, bound=bound).tolist()
    for n, (_, _, row) in enumerate(batch):
        drift = mean(y - x for x, y, other in batch if other == row)
        if abs(drift - bound) > 1e-9:
            assert close[n] == (advantages[n] >= 0 or drift <= bound)
    spec = LossSpec(surrogate="none", sequence_mask=bound)
    losses, _, held = compute_token_losses(new, old, advantages, rows, spec)
    assert held.tolist() == [not c for c in close]
    assert (losses[held] == 0).all() and (losses[~held] != 0).all()


def test_a_row_on_the_bound_is_close_and_a_token_without_advantage_is_never_held():
    log_ratio, rows = torch.tensor([-0.5, -0.5, -1.0, -1.0, -1.0]), torch.tensor([0, 0, 1, 1, 1])
    advantages = torch.tensor([-1.0, -1.0, -1.0, 0.0, 1.0])
    close = find_close_sequences(log_ratio, advantages, rows, bound=0.5)
    assert close.tolist() == [True, True, False, True, True]


@each_row("surrogate", SURROGATES)
@each_row("ratio", RATIOS)
@given(batch=batches)
def test_on_policy_every_loss_has_the_policy_gradient_and_none_without_advantages(
    surrogate, ratio, batch
):
    new, _, advantages, rows = drawn(batch)
    spec = LossSpec(surrogate=surrogate, ratio=ratio, sequence_mask=0.5)
    for scale in (1.0, 0.0):
        losses = compute_token_losses(new, new.detach(), scale * advantages, rows, spec).losses
        (gradient,) = torch.autograd.grad(losses.sum(), new)
        torch.testing.assert_close(gradient, -scale * advantages)


grids = st.lists(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-6, 0), st.booleans()), min_size=3, max_size=3),
    min_size=1,
    max_size=5,
)


def grid(rows):
    advantages, logprobs = (
        torch.tensor([[t[k] for t in row] for row in rows], dtype=torch.float64) for k in (0, 1)
    )
    return advantages, logprobs, torch.tensor([[t[2] for t in row] for row in rows])


@given(grids)
def test_covariances_are_products_of_deviations_within_the_mask(rows):
    advantages, logprobs, mask = grid(rows)
    found = compute_token_covariances(advantages, logprobs, mask)
    inside = [(a, x) for row in rows for a, x, m in row if m]
    for b, row in enumerate(rows):
        for t, (a, x, m) in enumerate(row):
            means = [mean(column) for column in zip(*inside, strict=True)]
            assert found[b, t].item() == near((a - means[0]) * (x - means[1]) if m else 0.0)


@given(grids, st.floats(0.01, 1))
def test_the_largest_covariances_are_a_share_of_the_tokens(rows, fraction):
    *_, mask = both = grid(rows)
    values = compute_token_covariances(*both)
    chosen = find_largest_covariances(values, mask, fraction=fraction)
    count = max(int(fraction * int(mask.sum())), 1)
    assert int(chosen.sum()) == min(count, int((values[mask] > 0).sum()))
    assert not (chosen & ~mask).any()
    rest = values[mask & ~chosen]
    assert not chosen.any() or not len(rest) or values[chosen].min() >= rest.max()


@given(grids, st.floats(0.01, 1), st.integers(0, 5))
def test_drawn_tokens_lie_between_the_bounds_and_a_seed_draws_the_same(rows, fraction, seed):
    *_, mask = both = grid(rows)
    values, how = compute_token_covariances(*both), {"fraction": fraction, "low": 0.1, "high": 2.0}
    chosen = draw_covariant_tokens(values, mask, **how, seed=seed)
    assert torch.equal(chosen, draw_covariant_tokens(values, mask, **how, seed=seed))
    candidates = mask & (values > 0.1) & (values < 2.0)
    assert not (chosen & ~candidates).any()
    count = max(int(fraction * int(mask.sum())), 1)
    assert int(chosen.sum()) == min(count, int(candidates.sum()))


def test_a_covariance_on_a_bound_is_not_drawn():
    values = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    chosen = draw_covariant_tokens(values, mask, fraction=1.0, low=0.5, high=1.5, seed=0)
    assert chosen.tolist() == [[False, False, True, False, False]]


@each_row(("surrogate", "dual_clip"), [("clip", None), ("clip", 2.0), ("cispo", None)])
@given(tokens)
def test_tokens_that_are_held_are_those_whose_clip_binds(surrogate, dual_clip, drawn):
    new, old, advantages = columns(drawn)
    advantages = advantages.where(advantages.abs() > 1e-6, 0.0)
    spec = LossSpec(surrogate=surrogate, clip=(0.2, 0.25), dual_clip=dual_clip)
    *_, held = compute_token_losses(new, old, advantages, torch.zeros(len(drawn)).long(), spec)
    for n, advantage in enumerate(advantages.tolist()):
        ratio = math.exp(new[n] - old[n])
        binds = ratio > 1.25 if advantage > 0 else ratio < 0.8 and advantage < 0
        if surrogate == "cispo":
            binds = advantage != 0 and not 0.8 <= ratio <= 1.25
        elif dual_clip is not None:
            binds |= ratio > dual_clip and advantage < 0
        assert held[n].item() == binds


@each_row(
    ("surrogate", "expected"),
    [
        ("dppo_tv", [True, False, False, True, False, False]),
        ("dppo_kl", [True, False, False, True, False, False]),
        ("log_clip", [True, False, False, True, False, False]),
        ("sapo", [False] * 6),
        ("none", [False] * 6),
    ],
)
def test_tokens_that_other_surrogates_hold(surrogate, expected):
    """Far up, far down and near, pushed on; far down with a push up, far up without a push."""
    old = torch.tensor([0.1, 0.9, 0.5, 0.9, 0.1, 0.1]).log()
    new = torch.tensor([0.9, 0.1, 0.5, 0.1, 0.9, 0.9]).log()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.0])
    spec = LossSpec(surrogate=surrogate, clip=(0.2, 0.25))
    *_, held = compute_token_losses(new, old, advantages, torch.zeros(6).long(), spec)
    assert held.tolist() == expected


def test_chosen_tokens_lose_their_gradient_or_pay_for_moving():
    new = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old, advantages, rows = torch.tensor([-1.5, -1.5, -3.0]), torch.ones(3), torch.zeros(3).long()
    chosen = torch.tensor([True, False, True])
    plain = LossSpec(surrogate="none")
    free, _, _ = compute_token_losses(new, old, advantages, rows, plain)
    clip = plain.model_copy(update={"covariance": ClipCovariance()})
    losses, _, held = compute_token_losses(new, old, advantages, rows, clip, chosen)
    assert losses.tolist() == near([0.0, free[1].item(), 0.0]) and torch.equal(held, chosen)
    kl = plain.model_copy(update={"covariance": KlCovariance(coefficient=2.0)})
    losses, _, held = compute_token_losses(new, old, advantages, rows, kl, chosen)
    torch.testing.assert_close(losses, free + torch.tensor([1.0, 0.0, 0.0]))
    assert not held.any()
