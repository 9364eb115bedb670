"""The second level of two-level credit: plain oracles, relations, and what each scale does."""

import math
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from rows import each_row

from rlx.credit import ema_scale, group_advantages, prompt_scale

HOW = {"ddof": 1, "eps": 1e-6}
close = partial(pytest.approx, rel=1e-9, abs=1e-9)
rewards = st.integers(0, 16).map(lambda n: n / 16)
# prompts of answers of confidences
trees = st.lists(
    st.lists(st.lists(rewards, min_size=2, max_size=4), min_size=1, max_size=3),
    min_size=1,
    max_size=3,
)


def first_level(trees, dtype=torch.float64, normalize="center"):
    """Advantages within each answer, and the prompt of each."""
    flat = [
        (reward, 10 * p + a, 5 - p)
        for p, answers in enumerate(trees)
        for a, siblings in enumerate(answers)
        for reward in siblings
    ]
    scores, answers, prompts = zip(*flat, strict=True)
    advantages = group_advantages(
        torch.tensor(scores, dtype=dtype), torch.tensor(answers), normalize=normalize
    )
    return advantages, torch.tensor(prompts)


@given(trees, st.sampled_from([0, 1]), st.sampled_from([1e-6, 1e-4]))
def test_prompt_scale_agrees_with_a_plain_loop(trees, ddof, eps):
    advantages, prompts = first_level(trees)
    expected = []
    for a, p in zip(advantages.tolist(), prompts.tolist(), strict=True):
        prompt = advantages[prompts == p].tolist()
        sigma = math.sqrt(sum(x * x for x in prompt) / (len(prompt) - ddof))
        expected.append(a / (sigma + eps))
    assert prompt_scale(advantages, prompts, ddof=ddof, eps=eps).tolist() == close(expected)


def test_two_confidences_of_a_prompt_have_one_degree_of_freedom():
    advantages, prompts = torch.tensor([0.25, -0.25]), torch.zeros(2, dtype=torch.int64)
    expected = [math.sqrt(0.5), -math.sqrt(0.5)]  # σ² = 2 · .0625 / (2 - 1)
    assert prompt_scale(advantages, prompts, ddof=1, eps=0.0).tolist() == pytest.approx(expected)


def test_answers_with_other_labels_keep_their_share_of_the_push():
    """Within an answer σ makes a sure and a doubtful answer push alike; within a prompt it does
    not, unless the prompt has no other answer."""
    doubtful, sure = [0.25, 0.75], [0.875, 0.9375]
    together, prompts = first_level([[doubtful, sure]])
    scaled = prompt_scale(together, prompts, **HOW)
    assert (scaled[1] / scaled[3]).item() == close(8.0)
    apart, prompts = first_level([[doubtful], [sure]])
    scaled = prompt_scale(apart, prompts, ddof=1, eps=0.0)
    assert scaled[1].item() == close(scaled[3].item())


@given(st.lists(trees, min_size=1, max_size=4), st.sampled_from([0.0, 0.9]))
def test_ema_scale_agrees_with_a_plain_loop_over_steps(steps, momentum):
    state = plain = None
    for trees in steps:
        advantages, _ = first_level(trees)
        values = advantages.tolist()
        if any(values):
            now = sum(a * a for a in values) / len(values)
            plain = now if plain is None else momentum * plain + (1 - momentum) * now
        expected = [a / (math.sqrt(plain) + 1e-6) if a else 0.0 for a in values]
        actual, state = ema_scale(advantages, state, momentum=momentum, eps=1e-6)
        assert actual.tolist() == close(expected)
        assert state == (None if plain is None else close(plain))


def test_the_first_step_has_unit_root_mean_square_and_later_ones_shrink_with_the_gradient():
    advantages, _ = first_level([[[0.25, 0.75]], [[0.0, 1.0]]])
    first, state = ema_scale(advantages, None, momentum=0.9, eps=0.0)
    assert first.square().mean().item() == close(1.0)
    later, _ = ema_scale(advantages / 100, state, momentum=0.9, eps=1e-6)
    assert 0.01 < later.square().mean().sqrt().item() < 0.011


def test_a_step_without_signal_does_not_touch_the_scale():
    nothing = torch.zeros(4)
    assert ema_scale(nothing, None, momentum=0.9, eps=1e-6)[1] is None
    assert ema_scale(torch.zeros(0), 0.25, momentum=0.9, eps=1e-6)[1] == 0.25
    advantages, state = ema_scale(nothing, 0.25, momentum=0.9, eps=1e-6)
    assert state == 0.25 and (advantages == 0).all()


@each_row("eps", [0.0, 1e-6])
@each_row(
    "scaled",
    [partial(prompt_scale, ddof=1), lambda a, _, eps: ema_scale(a, None, momentum=0.9, eps=eps)[0]],
    ids=["prompt_scale", "ema_scale"],
)
def test_zero_stays_exactly_zero_and_float32_stays_float32(scaled, eps):
    advantages, prompts = first_level([[[0.5] * 3, [0.7] * 12], [[0.1, 0.4]]], torch.float32)
    actual = scaled(advantages, prompts, eps=eps)
    assert actual.dtype == torch.float32
    assert (actual[:15] == 0).all() and (actual[15:] != 0).all() and actual.isfinite().all()
