"""Expected scores of stated confidences: worked by hand, enumerated, and against many samples."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from rows import each_row

from rlx.loss import compute_expected_score_loss, compute_proper_scores

SCORES = ["brier", "log", "spherical"]
GRID = torch.arange(21, dtype=torch.float64) / 20


@each_row(
    ("score", "right", "wrong"),
    [
        ("brier", [0.0, 0.75, 1.0], [1.0, 0.75, 0.0]),
        ("log", [0.0, 1 - math.log(2) / math.log(1000), 1.0], None),
        ("spherical", [0.0, math.sqrt(0.5), 1.0], None),
    ],
)
def test_scores_of_never_half_and_always(score, right, wrong):
    values = torch.tensor([0.0, 0.5, 1.0])
    found = compute_proper_scores(values, torch.tensor([1.0, 0.0]), score)
    expected = torch.tensor([right, wrong or right[::-1]])
    torch.testing.assert_close(found, expected)


@each_row("score", SCORES)
@given(st.integers(0, 20))
def test_the_truth_earns_most_in_expectation(score, truth):
    p = GRID[truth]
    outcomes = compute_proper_scores(GRID, torch.tensor([1.0, 0.0], dtype=p.dtype), score)
    earned = p * outcomes[0] + (1 - p) * outcomes[1]
    assert int(earned.argmax()) == truth
    assert (earned >= 0).all()
    assert (earned <= 1).all(), "no value is worth less than saying nothing, which scores 0"


@each_row(("values", "labels"), [([0.5, 1.5], [1.0]), ([0.5], [0.0, -1.0]), ([0.5], [2.0])])
def test_what_is_no_probability_is_refused(values, labels):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        compute_proper_scores(torch.tensor(values), torch.tensor(labels), "brier")


def _draw_policy(seed):
    """Logits of four confidences over the grid and five other tokens, with labels and weights."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, len(GRID) + 5, generator=draw, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.25, 0.0, 2.0], dtype=torch.float64)
    return logits, labels, weights


@each_row("score", SCORES)
def test_the_gradient_is_the_one_by_moments_or_by_enumeration(score):
    logits, labels, weights = _draw_policy(0)
    scores = compute_proper_scores(GRID, labels, score)
    stated = torch.log_softmax(logits, dim=1)[:, : len(GRID)]
    loss = compute_expected_score_loss(
        stated.flatten(), scores.flatten(), weights.repeat_interleave(len(GRID))
    )
    (found,) = torch.autograd.grad(loss, logits)
    # d π(v) / d logit_k = π(v) (1[v = k] - π(k)), and what is no value of the grid earns 0.
    policy = logits.detach().softmax(dim=1)
    earned = torch.zeros_like(policy)
    earned[:, : len(GRID)] = scores
    mean = (policy * earned).sum(dim=1, keepdim=True)
    expected = -weights[:, None] * policy * (earned - mean)
    torch.testing.assert_close(found, expected)
    if score == "brier":  # m₀ (1 - y) - m₂ + 2 y m₁ for labels of 0 and 1
        m0, m1, m2 = (policy[:, : len(GRID)] @ GRID**k for k in range(3))
        moments = torch.where(labels == 1, 2 * m1 - m2, m0 - m2)
        assert float(loss.detach()) == pytest.approx(-float((weights * moments).sum()))
