"""Comparing scores within groups: worked examples, a plain loop as the oracle, and properties."""

import math
from dataclasses import replace
from statistics import mean

import bound
import hypothesis.strategies as st
import pytest
import torch
from golden_records import build_credit_inputs
from hypothesis import example, given
from rows import each_row

from rlx.credit import CreditInputs, group_advantages, spread_over_mask, total_scores
from rlx.errors import ShapeError

scores_of_a_group = st.lists(st.floats(-10, 10), min_size=1, max_size=8)
groups = st.lists(scores_of_a_group, min_size=1, max_size=5)
options = st.fixed_dictionaries(
    {
        "normalize": st.sampled_from(["std", "center", "leave_one_out"]),
        "ddof": st.sampled_from([0, 1]),
        "eps": st.sampled_from([1e-6, 1e-4]),
        "singleton": st.sampled_from(["zero", "raw"]),
    }
)


def near(expected):
    return pytest.approx(expected, rel=1e-6, abs=1e-9)


def advantages_of(scores, ids, dtype=torch.float64, **options):
    scores = torch.tensor(scores, dtype=dtype)
    return group_advantages(scores, torch.tensor(ids), **options).tolist()


def flat(groups):
    return (
        [score for group in groups for score in group],
        [number for number, group in enumerate(groups) for _ in group],
    )


def oracle(group, *, normalize, ddof, eps, singleton):
    """One group, as a textbook has it."""
    if len(group) == 1 and singleton == "raw":
        return [group[0] / (1 + eps) if normalize == "std" else group[0]]
    if max(group) == min(group):
        return [0.0] * len(group)
    centre = mean(group)
    if normalize == "leave_one_out":
        return [x - mean(group[:i] + group[i + 1 :]) for i, x in enumerate(group)]
    sigma = math.sqrt(sum((x - centre) ** 2 for x in group) / (len(group) - ddof))
    return [(x - centre) / (sigma + eps if normalize == "std" else 1) for x in group]


def inputs_of(scores, levels, group_ids):
    """One turn per row, rewarded with the row's score; all rows are of one tree."""
    inputs = {
        "turn_rewards": torch.tensor(scores, dtype=torch.float64)[:, None],
        "levels": levels,
        "group_ids": torch.tensor(group_ids),
        "tree_ids": torch.zeros(len(scores), dtype=torch.int64),
    }
    return build_credit_inputs(inputs)


def below_answers(scores):
    """Two answers, and two confidences below each."""
    return inputs_of(scores, [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2])


def two_level(inputs, **options):
    return bound.estimator("two_level", **options)(inputs)


def test_two_level_compares_each_level_by_its_own_rule():
    scores = [1.0, 0.0, 0.96, 0.75, 0.19, 0.91]
    x = below_answers(scores)
    above = {"normalize": "std", "ddof": 1, "eps": 0.5, "singleton": "zero"}
    below = {"normalize": "std", "ddof": 0, "eps": 1e-4, "singleton": "zero"}
    both = two_level(x, **above, confidence=below, lambda_ans=2.0, lambda_conf=3.0)
    answers = [2 * a for a in oracle(scores[:2], **above)]
    confidences = [3 * a for pair in (scores[2:4], scores[4:]) for a in oracle(pair, **below)]
    assert both[:, 0].tolist() == pytest.approx(answers + confidences, rel=1e-12)
    default = two_level(x, ddof=0, eps=1e-4)[2:, 0].tolist()
    assert default == pytest.approx([0.105, -0.105, -0.36, 0.36], rel=1e-12)


def test_two_level_treats_a_single_answer_and_a_single_confidence_each_by_its_own_rule():
    x = inputs_of([1.0, 0.5], [0, 1], [0, 1])
    raw = {"singleton": "raw"}
    assert two_level(x)[:, 0].tolist() == [0.0, 0.0]
    assert two_level(x, confidence=raw)[:, 0].tolist() == [0.0, 0.5]
    assert two_level(x, normalize="center", singleton="raw")[:, 0].tolist() == [1.0, 0.0]


def test_a_prompt_can_be_the_group_on_every_level():
    """Two answers and two confidences below each: groups of 2 and 4 by prompt, 2 by siblings."""
    scores = [1.0, 0.0, 0.9, 0.7, 0.2, 0.4]
    x = below_answers(scores)
    below = {"normalize": "center", "baseline": "prompt"}
    found = two_level(x, normalize="center", confidence=below)[:, 0].tolist()
    assert found == near([0.5, -0.5, 0.35, 0.15, -0.35, -0.15])
    for baseline, expected in (
        ("prompt", [0.5, -0.5, 0.35, 0.15, -0.35, -0.15]),
        ("siblings", [0.5, -0.5, 0.1, -0.1, -0.1, 0.1]),
    ):
        grpo = bound.estimator("grpo", normalize="center", baseline=baseline)(x)
        assert grpo[:, 0].tolist() == near(expected)


def test_confidences_come_first_where_the_rows_say_so():
    """Confidences on level 0 keep their own rule and factor, and so do the answers below."""
    scores = [0.9, 0.5, 1.0, 0.0, 1.0, 1.0]
    x = below_answers(scores)
    x = replace(x, is_confidence=torch.tensor([True, True, False, False, False, False]))
    rules = {"normalize": "center", "confidence": {"normalize": "leave_one_out"}, "lambda_conf": 3}
    assert two_level(x, **rules)[:, 0].tolist() == near([1.2, -1.2, 0.5, -0.5, 0.0, 0.0])
    whole = two_level(x, **rules, baseline="prompt")[:, 0].tolist()
    assert whole == near([1.2, -1.2, 0.25, -0.75, 0.25, 0.25])


@given(groups, options)
def test_agrees_with_a_plain_loop(groups, options):
    scores, ids = flat(groups)
    expected = [a for group in groups for a in oracle(group, **options)]
    # σ of nearly equal scores is itself rounding; a hair of absolute slack per unit of ε.
    assert advantages_of(scores, ids, **options) == pytest.approx(expected, rel=1e-9, abs=1e-8)


@given(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(2, 64)), min_size=1, max_size=6),
    st.sampled_from(["std", "center", "leave_one_out", "batch_std"]),
    st.sampled_from([0.0, 1e-6]),
)
def test_equal_scores_carry_no_signal_not_even_rounding(groups, normalize, eps):
    scores, ids = flat([[score] * size for score, size in groups])
    actual = advantages_of(scores, ids, torch.float32, normalize=normalize, eps=eps)
    assert actual == [0.0] * len(scores)


@given(groups, st.sampled_from([0, 1]), st.sampled_from(["zero", "raw"]))
def test_the_deviation_of_a_batch_is_one_for_all_groups(groups, ddof, singleton):
    scores, ids = flat(groups)
    how = {"ddof": ddof, "singleton": singleton}
    found = advantages_of(scores, ids, normalize="batch_std", eps=1e-4, **how)
    sigma = math.sqrt(sum((x - mean(scores)) ** 2 for x in scores) / max(len(scores) - ddof, 1))
    centred = advantages_of(scores, ids, normalize="center", **how)
    assert found == pytest.approx([a / (sigma + 1e-4) for a in centred], rel=1e-7, abs=1e-8)


def test_answers_and_confidences_have_a_deviation_each():
    scores = [1.0, 0.0, 0.96, 0.75, 0.19, 0.91]
    x = below_answers(scores)
    batch = {"normalize": "batch_std"}
    found = two_level(x, **batch, confidence=batch)[:, 0].tolist()
    answers = advantages_of(scores[:2], [0, 0], **batch)
    confidences = advantages_of(scores[2:], [1, 1, 2, 2], **batch)
    assert found == pytest.approx(answers + confidences, rel=1e-12)


def test_total_is_the_mean_of_the_rewarded_turns_plus_the_global_rewards():
    rewards = torch.tensor([[0.5, 1.0, 0.0], [0.0, math.nan, math.nan], [0.4, 9.0, 0.8]])
    inputs = {
        "turn_rewards": rewards,
        "turn_present": [[True, True, True], [False, False, False], [True, False, True]],
        "global_rewards": torch.tensor([0.25, 0.25, 0.0]),
    }
    x = replace(build_credit_inputs(inputs), turn_rewards=rewards)
    assert total_scores(x).tolist() == pytest.approx([0.75, 0.25, 0.6])
    assert bound.estimator("grpo", normalize="center")(x)[:, 0].tolist() == pytest.approx(
        [0.75 - 1.6 / 3, 0.25 - 1.6 / 3, 0.6 - 1.6 / 3]
    )


def test_a_row_whose_score_is_nan_stays_within_its_mask():
    actual = spread_over_mask(
        torch.tensor([math.nan, 2.0]), torch.tensor([[False, False], [True, False]])
    )
    assert actual.tolist() == [[0.0, 0.0], [2.0, 0.0]]


@each_row(
    ("change", "complaint"),
    [
        ({"tree_ids": torch.zeros(3)}, "tree_ids has 3 rows, not 2"),
        ({"mask": torch.ones(3, 1)}, "mask has 3 rows, not 2"),
        ({"turn_present": torch.ones(2, 2)}, r"turn_present is \(2, 2\), turn_rewards is \(2, 1\)"),
        ({"turn_ids": torch.ones(2, 4)}, r"turn_ids is \(2, 4\), mask is \(2, 1\)"),
        ({"global_rewards": torch.ones(2, 1)}, r"global_rewards is \(2, 1\), not \[B\]"),
    ],
)
def test_inputs_that_disagree_are_refused(change, complaint):
    x = inputs_of([1.0, 2.0], [0, 0], [0, 0])
    with pytest.raises(ShapeError, match=complaint):
        CreditInputs(**{**vars(x), **change})


@given(
    reward=st.floats(-5, 5, width=32),
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=8),
)
@example(reward=3.303845873493707e-38, lengths=[1, 298])
def test_a_reward_that_was_spread_and_summed_again_is_the_same_reward(reward, lengths):
    sums = torch.stack([(torch.full((n,), reward) / n).sum() for n in lengths])
    ids = torch.zeros(len(lengths), dtype=torch.int64)
    assert group_advantages(sums, ids).tolist() == [0.0] * len(lengths)
    means = torch.stack([torch.full((n,), reward).sum() / n for n in lengths])
    assert group_advantages(means, ids, normalize="center").tolist() == [0.0] * len(lengths)


def test_what_is_not_a_number_is_not_taken_for_silence():
    advantages = group_advantages(
        torch.tensor([math.nan, 1, 0, 2, 1]), torch.tensor([0, 0, 0, 1, 1])
    )
    assert advantages[:3].isnan().any()
    assert advantages[3:].isfinite().all()
