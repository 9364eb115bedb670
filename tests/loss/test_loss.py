"""Surrogate, aggregation and bonus: worked example, scalar oracle, and properties."""

import json
import math
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rlx.loss import aggregation_weights, clipped_surrogate, entropy_weights

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden", "golden.json").read_text())
(G26,) = (example for example in GOLDEN["examples"] if example["id"] == "g26")

masks = st.integers(1, 6).flatmap(
    lambda width: st.lists(
        st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=8
    )
)
rules = st.fixed_dictionaries(
    {"aggregate": st.sampled_from(["token_mean", "sequence_mean"]), "per_turn": st.booleans()}
)
kinds_of = st.lists(st.integers(0, 2), min_size=8, max_size=8)


def near(expected):
    return pytest.approx(expected, rel=GOLDEN["rtol"], abs=GOLDEN["atol"])


# Worked example -----------------------------------------------------------------------------------


def g26_token_losses():
    config, x = G26["config"], G26["inputs"]
    return clipped_surrogate(
        torch.tensor(x["ratio"], dtype=torch.float64).log(),
        torch.zeros(2, 4, dtype=torch.float64),
        torch.tensor(x["advantages"], dtype=torch.float64),
        clip=(config["clip_low"], config["clip_high"]),
        dual_clip=config["dual_clip_c"],
    )


def test_golden_g26_token_losses():
    for actual, expected in zip(
        g26_token_losses().tolist(), G26["outputs"]["token_loss_dual_clip"], strict=True
    ):
        assert actual == near(expected)


def test_golden_g26_loss_is_the_mean_over_the_tokens_that_learn():
    weights = aggregation_weights(
        torch.tensor(G26["inputs"]["mask"], dtype=torch.bool),
        torch.tensor([0, 1]),
        aggregate="token_mean",
        per_turn=False,
    )
    assert (weights * g26_token_losses()).sum().item() == near(0.48571428502)
    assert G26["outputs"]["loss"] == 0.48571428502


def test_averages_of_the_worked_example_by_row_and_by_kind():
    """Row 0 sums to -2.7 over 3 tokens and row 1 to 6.1 over 4."""
    mask = torch.tensor(G26["inputs"]["mask"], dtype=torch.bool)
    losses = {}
    for aggregate in ("token_mean", "sequence_mean"):
        for per_turn in (False, True):
            weights = aggregation_weights(
                mask, torch.tensor([0, 1]), aggregate=aggregate, per_turn=per_turn
            )
            losses[aggregate, per_turn] = (weights * g26_token_losses()).sum().item()
    by_kind = -2.7 / 3 + 6.1 / 4
    assert losses["token_mean", True] == near(by_kind)
    assert losses["sequence_mean", False] == near(by_kind / 2)
    assert losses["sequence_mean", True] == near(by_kind)


# Surrogate ----------------------------------------------------------------------------------------


def oracle(logprob, old, advantage, *, clip, dual_clip):
    ratio = math.exp(logprob - old)
    clipped = min(max(ratio, 1 - clip[0]), 1 + clip[1])
    loss = -min(ratio * advantage, clipped * advantage)
    if dual_clip is not None and advantage < 0:
        loss = min(loss, -dual_clip * advantage)
    return loss


logprob = st.floats(-8, 0)
tokens = st.lists(st.tuples(logprob, logprob, st.floats(-5, 5)), min_size=1, max_size=10)
clips = st.tuples(st.floats(0.01, 0.9), st.floats(0.01, 0.9))


@settings(deadline=None)
@given(tokens, clips, st.none() | st.floats(1.5, 10))
def test_surrogate_agrees_with_a_plain_loop(tokens, clip, dual_clip):
    columns = torch.tensor(tokens, dtype=torch.float64).unbind(dim=1)
    actual = clipped_surrogate(*columns, clip=clip, dual_clip=dual_clip).tolist()
    expected = [oracle(*token, clip=clip, dual_clip=dual_clip) for token in tokens]
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(tokens, clips)
def test_on_policy_the_gradient_is_the_policy_gradient(tokens, clip):
    old, _, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(dim=1)
    logprobs = old.clone().requires_grad_()
    clipped_surrogate(logprobs, old, advantages, clip=clip, dual_clip=3.0).sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize(
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
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clipped_surrogate(
        logprobs, torch.zeros(1), torch.tensor([advantage]), clip=(0.2, 0.25), dual_clip=3.0
    )
    loss.sum().backward()
    assert logprobs.grad.item() == pytest.approx(-ratio * advantage if moves else 0.0)


# Aggregation --------------------------------------------------------------------------------------


def weights_of(mask, kinds, rule):
    return aggregation_weights(
        torch.tensor(mask, dtype=torch.bool), torch.tensor(kinds[: len(mask)]), **rule
    )


@settings(deadline=None)
@given(masks, kinds_of, rules)
def test_weights_sum_to_one_for_the_step_or_for_each_kind(mask, kinds, rule):
    weights, kinds = weights_of(mask, kinds, rule), kinds[: len(mask)]
    per_row = weights.sum(dim=1).tolist()
    for group in [{kind} for kind in set(kinds)] if rule["per_turn"] else [set(kinds)]:
        rows = [b for b, kind in enumerate(kinds) if kind in group]
        learns = any(any(mask[b]) for b in rows)
        assert sum(per_row[b] for b in rows) == pytest.approx(float(learns), abs=1e-6)


@settings(deadline=None)
@given(masks, kinds_of, rules)
def test_only_tokens_that_learn_have_weight_and_alike_ones_have_the_same(mask, kinds, rule):
    weights, mask = weights_of(mask, kinds, rule), torch.tensor(mask)
    assert torch.equal(weights > 0, mask)
    assert weights.dtype == torch.float32
    for kind in set(kinds[: len(mask)]) if rule["per_turn"] else [None]:
        rows = torch.tensor([kind in (None, k) for k in kinds[: len(mask)]])
        if rule["aggregate"] == "token_mean":
            assert len(weights[rows][mask[rows]].unique()) <= 1
        else:
            sums = weights[rows].sum(dim=1)[mask[rows].any(dim=1)]
            torch.testing.assert_close(sums, torch.full_like(sums, 1 / max(1, len(sums))))


@settings(deadline=None)
@given(masks, kinds_of, rules, st.data())
def test_the_loss_is_the_same_however_the_batch_is_cut(mask, kinds, rule, data):
    weights = weights_of(mask, kinds, rule)
    losses = torch.randn(weights.shape, generator=torch.Generator().manual_seed(len(mask)))
    whole = (weights * losses).sum()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(mask)))) | {0, len(mask)})
    parts = [(weights[a:b] * losses[a:b]).sum() for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


@settings(deadline=None)
@given(masks, kinds_of, rules)
def test_padding_and_the_numbers_of_kinds_change_nothing(mask, kinds, rule):
    weights = weights_of(mask, kinds, rule)
    padded = weights_of([[*row, False, False] for row in mask], [9 - 4 * k for k in kinds], rule)
    torch.testing.assert_close(padded[:, :-2], weights)


@settings(deadline=None)
@given(masks, kinds_of, st.sampled_from(["token_mean", "sequence_mean"]))
def test_one_kind_is_no_kind(mask, kinds, aggregate):
    one = [kinds[0]] * len(mask)
    torch.testing.assert_close(
        weights_of(mask, one, {"aggregate": aggregate, "per_turn": True}),
        weights_of(mask, kinds, {"aggregate": aggregate, "per_turn": False}),
    )


def test_short_confidences_are_not_drowned_by_answers():
    mask = torch.tensor([[True] * 9, [True] + [False] * 8])
    rules = {"aggregate": "token_mean"}
    joint = aggregation_weights(mask, torch.tensor([0, 1]), per_turn=False, **rules)
    apart = aggregation_weights(mask, torch.tensor([0, 1]), per_turn=True, **rules)
    assert joint.sum(dim=1).tolist() == pytest.approx([0.9, 0.1])
    assert apart.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])


# Entropy bonus ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(masks, st.floats(0.001, 2))
def test_the_bonus_is_a_mean_over_the_contents_of_the_span(mask, coefficient):
    weights = entropy_weights(torch.tensor(mask), coefficient)
    assert torch.equal(weights > 0, torch.tensor(mask))
    assert weights.sum().item() == pytest.approx(coefficient * any(map(any, mask)), rel=1e-5)
