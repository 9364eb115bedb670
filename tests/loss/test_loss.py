"""Ratio, surrogate, aggregation, bonus and the critic's loss: worked examples, scalar oracles, and
properties.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from rows import each_row

from rlx.loss import (
    aggregation_weights,
    clipped_surrogate,
    compute_cispo_loss,
    compute_unclipped_loss,
    entropy_weights,
    sequence_log_ratio,
    value_loss,
)

AGGREGATES = ["token_mean", "sequence_mean", "sequence_sum", "constant"]

masks = st.integers(1, 6).flatmap(
    lambda width: st.lists(
        st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=8
    )
)
rules = st.fixed_dictionaries({"aggregate": st.sampled_from(AGGREGATES), "per_turn": st.booleans()})
kinds_of = st.lists(st.integers(0, 2), min_size=8, max_size=8)


def near(expected):
    return pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 4)), max_size=20))
def test_a_sequence_has_the_mean_of_its_log_ratios(tokens):
    log_ratio = torch.tensor([x for x, _ in tokens], dtype=torch.float64)
    rows = [10 * row for _, row in tokens]
    found = sequence_log_ratio(log_ratio, torch.tensor(rows, dtype=torch.int64)).tolist()
    for value, row in zip(found, rows, strict=True):
        own = [x for (x, _), r in zip(tokens, rows, strict=True) if r == row]
        assert value == pytest.approx(sum(own) / len(own), abs=1e-12)


def test_every_token_of_a_sequence_pulls_alike():
    log_ratio = torch.zeros(5, requires_grad=True)
    rows = torch.tensor([3, 1, 3, 3, 1])
    compute_unclipped_loss(
        sequence_log_ratio(log_ratio, rows), torch.tensor([2.0, 1, 2, 2, 1])
    ).sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([-2, -1, -2, -2, -1])


def oracle(log_ratio, advantage, *, clip, dual_clip):
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - clip[0]), 1 + clip[1])
    loss = -min(ratio * advantage, clipped * advantage)
    if dual_clip is not None and advantage < 0:
        loss = min(loss, -dual_clip * advantage)
    return loss


tokens = st.lists(st.tuples(st.floats(-8, 8), st.floats(-5, 5)), min_size=1, max_size=10)
clips = st.tuples(st.floats(0.01, 0.9), st.floats(0.01, 0.9))


@given(tokens, clips, st.none() | st.floats(1.5, 10))
def test_surrogate_agrees_with_a_plain_loop(tokens, clip, dual_clip):
    columns = torch.tensor(tokens, dtype=torch.float64).unbind(dim=1)
    actual = clipped_surrogate(*columns, clip=clip, dual_clip=dual_clip).tolist()
    expected = [oracle(*token, clip=clip, dual_clip=dual_clip) for token in tokens]
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(tokens, clips)
def test_cispo_weighs_a_log_probability_by_its_clipped_ratio(tokens, clip):
    log_ratio, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(dim=1)
    logprobs = (log_ratio - 9).requires_grad_()
    losses = compute_cispo_loss(logprobs + 9, advantages, logprobs, clip=clip)
    losses.sum().backward()
    for n, (x, advantage) in enumerate(tokens):
        weight = min(max(math.exp(x), 1 - clip[0]), 1 + clip[1])
        assert losses[n].item() == pytest.approx(-weight * advantage * (x - 9), abs=1e-9)
        assert logprobs.grad[n].item() == pytest.approx(-weight * advantage, abs=1e-9)


@each_row(
    ("ratio", "advantage", "moves"),
    [
        (1.1, 1.0, True),
        (1.3, 1.0, False),  # already more likely than the clip allows
        (0.5, 1.0, True),  # less likely: still pulled back
        (0.9, -1.0, True),
        (0.5, -1.0, False),
        (1.5, -1.0, True),  # a bad token that became likelier is pushed down,
        (3.5, -1.0, False),  # but not without bound
    ],
)
def test_which_tokens_move(ratio, advantage, moves):
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clipped_surrogate(log_ratio, torch.tensor([advantage]), clip=(0.2, 0.25), dual_clip=3.0)
    loss.sum().backward()
    assert log_ratio.grad.item() == pytest.approx(-ratio * advantage if moves else 0.0)


@given(
    st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=10),
    st.none() | st.floats(0.01, 2),
)
def test_value_loss_agrees_with_a_plain_loop(tokens, clip):
    values, old, returns = torch.tensor(tokens, dtype=torch.float64).unbind(dim=1)
    values.requires_grad_()
    found = value_loss(values, old, returns, clip=clip)
    found.sum().backward()
    for n, (v, before, r) in enumerate(tokens):
        near = v if clip is None else max(before - clip, min(before + clip, v))
        held = (near - r) ** 2 > (v - r) ** 2
        assert found[n].item() == pytest.approx((near - r if held else v - r) ** 2 / 2)
        if abs((near - r) ** 2 - (v - r) ** 2) > 1e-9 or near == v:
            assert values.grad[n].item() == pytest.approx(0 if held else v - r)


def test_a_value_clip_needs_something_to_be_near_to():
    with pytest.raises(ValueError, match="old_values"):
        value_loss(torch.zeros(1), None, torch.zeros(1), clip=0.5)
    assert value_loss(torch.zeros(1), None, torch.full((1,), 2.0), clip=None).tolist() == [2]


LENGTHS = {0: 5, 1: 8, 2: 3}
"""What the constant aggregation divides by, for each kind."""


def weights_of(mask, kinds, rule):
    lengths = torch.tensor([LENGTHS[kind] for kind in kinds[: len(mask)]])
    kinds = torch.tensor(kinds[: len(mask)])
    return aggregation_weights(
        torch.tensor(mask, dtype=torch.bool), kinds, **rule, constant_lengths=lengths
    )


def plain_weight(mask, kinds, row, rule):
    """Of one learning token of a row."""
    group = [b for b, k in enumerate(kinds) if not rule["per_turn"] or k == kinds[row]]
    rows = sum(any(mask[b]) for b in group)
    match rule["aggregate"]:
        case "token_mean":
            return 1 / sum(sum(mask[b]) for b in group)
        case "sequence_mean":
            return 1 / sum(mask[row]) / rows
        case "sequence_sum":
            return 1 / rows
        case "constant":
            return 1 / LENGTHS[kinds[row]] / rows


@given(masks, kinds_of, rules)
def test_weights_agree_with_a_plain_loop(mask, kinds, rule):
    found, kinds = weights_of(mask, kinds, rule), kinds[: len(mask)]
    assert found.dtype == torch.float32
    for b, row in enumerate(mask):
        for t, learns in enumerate(row):
            expected = plain_weight(mask, kinds, b, rule) if learns else 0
            assert found[b, t].item() == pytest.approx(expected, rel=1e-6)


def test_a_constant_has_to_be_given():
    with pytest.raises(ValueError, match="constant_lengths"):
        aggregation_weights(
            torch.ones(1, 1).bool(), torch.zeros(1), aggregate="constant", per_turn=False
        )


@given(masks, kinds_of, rules)
def test_padding_and_the_numbers_of_kinds_change_nothing(mask, kinds, rule):
    weights = weights_of(mask, kinds, rule)
    lengths = torch.tensor([LENGTHS[kind] for kind in kinds[: len(mask)]])
    padded = aggregation_weights(
        torch.tensor([[*row, False, False] for row in mask], dtype=torch.bool),
        torch.tensor([9 - 4 * kind for kind in kinds[: len(mask)]]),
        **rule,
        constant_lengths=lengths,
    )
    torch.testing.assert_close(padded[:, :-2], weights)


@given(masks, st.floats(0.001, 2))
def test_the_bonus_is_a_mean_over_the_contents_of_the_span(mask, coefficient):
    weights = entropy_weights(torch.tensor(mask), coefficient)
    assert torch.equal(weights > 0, torch.tensor(mask))
    assert weights.sum().item() == pytest.approx(coefficient * any(map(any, mask)), rel=1e-5)


@each_row("advantage", [1.0, 0.0, -1.0])
@each_row("log_ratio", [100.0, -100.0])
def test_a_ratio_beyond_all_bounds_leaves_a_gradient_that_is_a_number(log_ratio, advantage):
    for surrogate in (
        lambda x, a: clipped_surrogate(x, a, clip=(0.2, 0.2), dual_clip=None),
        lambda x, a: clipped_surrogate(x, a, clip=(0.2, 0.2), dual_clip=3.0),
        compute_unclipped_loss,
    ):
        x = torch.tensor(log_ratio, requires_grad=True)
        surrogate(x, torch.tensor(advantage)).backward()
        assert x.grad.isfinite()
