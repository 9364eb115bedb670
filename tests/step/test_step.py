"""A step of two turns, small enough to be worked by hand."""

import math

import bound
import pytest
import torch
from rows import each_row
from token_trees import prompt, turn

from rlx.batch import build_token_batch
from rlx.credit import CreditInputs
from rlx.phase_setup import CreditRules
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree
from rlx.spec import ConfidenceSpec, CreditSpec, EntropyBonus, ExpectedScore, LossSpec
from rlx.step import ScoredRows, TokenStreams, assign_credit


def confidence(parent, *ids, **spans):
    return turn(parent, *ids, kind="confidence", number=2, **spans)


LOG2 = math.log(2)

# A right answer of four tokens and a wrong one of two; two confidences below each.
# Tokens of `think` or `answer` learn, and the end token; token 5 stands between the spans.
TREE = RolloutTree(
    Problem(id="p", prompt="?", fields={}),
    (
        prompt(NO_PARENT, 1, 2),
        turn(0, 3, 4, 5, 6, answer=((0, 2), (1, 2))),
        turn(0, 7, 8, answer=((0, 1), (0, 1))),
        prompt(1, 9),
        prompt(2, 9),
        confidence(3, 10, 11, confidence=((0, 1), (0, 1))),
        confidence(3, 12, confidence=((0, 1), (0, 1))),
        confidence(4, 13),
        confidence(4, 14, 15, confidence=((0, 2), (1, 2))),
    ),
)

# accuracy 1 and 0; Brier of 0.8 and 0.5 for the right answer, of 0.9 and 0.3 for the wrong one.
REWARDS = {
    "turn_rewards": torch.tensor([[1, 0], [0, 0], [0, 0.96], [0, 0.75], [0, 0.19], [0, 0.91]]),
    "turn_present": torch.tensor([[True, False]] * 2 + [[False, True]] * 4),
    "global_rewards": torch.zeros(6),
}

#            1, 2 | 3     4     5    6 (or 7 8 | 9 …)
BY_HAND = [
    [0, 0, 0.5, 0.5, 0, 0.5, 0, 0, 0],
    [0, 0, -0.5, -0.5, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0.42, 0.42],  # 4 · (0.96 - 0.855)
    [0, 0, 0, 0, 0, 0, 0, -0.42, 0],
    [0, 0, 0, 0, 0, -1.44, 0, 0, 0],  # 4 · (0.19 - 0.55); no span, so all of it learns
    [0, 0, 0, 0, 0, 1.44, 1.44, 0, 0],
]

estimator = bound.estimator("two_level", normalize="center", lambda_conf=4.0)


def step(trees=(TREE,), rewards=REWARDS, estimator=estimator, old=None, mask=None, **loss):
    batch = build_token_batch(trees)
    mask = bound.mask("turn_spans")(batch) if mask is None else mask
    return assign_credit(
        ScoredRows.join(batch, mask, **rewards),
        TokenStreams(old_logprobs=batch.behaviour_logprobs if old is None else old),
        CreditRules(
            estimator=estimator,
            credit=CreditSpec(),
            loss=LossSpec(**loss),
            max_tokens={"answer": 4, "confidence": 2},
            confidences=("0.0", "0.5", "1.0"),
        ),
    )


def test_answers_learn_from_answers_and_confidences_from_their_siblings():
    train = step()
    torch.testing.assert_close(train.advantages, torch.tensor(BY_HAND))
    assert torch.equal(train.mask, torch.tensor(BY_HAND) != 0)
    assert train.advantages.dtype == torch.float32


def test_covariance_chooses_tokens_once_for_the_whole_step():
    old = torch.linspace(-2, -0.1, 54).view(6, 9)
    rule = {"kind": "kl", "fraction": 0.2}
    chosen = step(old=old, covariance=rule).covariant
    mask, advantages = torch.tensor(BY_HAND) != 0, torch.tensor(BY_HAND)
    products = (advantages - advantages[mask].mean()) * (old - old[mask].mean())
    count = int(0.2 * int(mask.sum()))
    largest = products.masked_fill(~mask, -torch.inf).flatten().topk(count).indices
    assert sorted(chosen.flatten().nonzero()[:, 0].tolist()) == sorted(largest.tolist())
    drawn = {"kind": "clip", "fraction": 0.2, "low": 0.0}
    first, again = (step(old=old, covariance=drawn) for _ in range(2))
    assert torch.equal(first.covariant, again.covariant) and first.covariant.any()
    assert torch.equal(first.weights, step(old=old).weights)
    assert step(old=old).covariant is None


@each_row(
    ("loss", "by_hand"),
    [
        ({"aggregate": "token_mean"}, [3 / 11, 2 / 11, 2 / 11, 1 / 11, 1 / 11, 2 / 11]),
        ({"aggregate": "sequence_mean"}, [1 / 6] * 6),
        ({"aggregate": "sequence_sum"}, [3 / 6, 2 / 6, 2 / 6, 1 / 6, 1 / 6, 2 / 6]),
        ({"aggregate": "constant"}, [3 / 24, 2 / 24, 2 / 12, 1 / 12, 1 / 12, 2 / 12]),
        (
            {"aggregate": "constant", "constant_length": 10},
            [3 / 60, 2 / 60, 2 / 60, 1 / 60, 1 / 60, 2 / 60],
        ),
        ({"aggregate": "token_mean", "per_turn": True}, [3 / 5, 2 / 5, 2 / 6, 1 / 6, 1 / 6, 2 / 6]),
        ({"aggregate": "sequence_mean", "per_turn": True}, [1 / 2] * 2 + [1 / 4] * 4),
    ],
)
def test_how_much_each_row_counts(loss, by_hand):
    torch.testing.assert_close(step(**loss).weights.sum(dim=1), torch.tensor(by_hand))


def test_the_bonus_falls_on_what_the_confidences_say_and_not_on_their_tags():
    train = step(entropy=EntropyBonus(coefficient=0.3, span="confidence"))
    # One content token in each of three rows. The end token beside row 2's is no content.
    expected = torch.zeros(6, 9)
    expected[[2, 3, 5], [7, 7, 6]] = 0.1
    torch.testing.assert_close(train.entropy_weights, expected)


def test_no_bonus_without_the_option_or_without_the_span():
    assert not step().entropy_weights.any()
    nowhere = step(entropy=EntropyBonus(coefficient=0.3, span="verdict"))
    assert not nowhere.entropy_weights.any()


def test_the_estimator_sees_the_batch_and_the_rewards_as_they_are():
    seen = []

    def spy(inputs):
        seen.append(inputs)
        return bound.estimator("grpo")(inputs)

    train = step(estimator=spy)
    (inputs,) = seen
    assert isinstance(inputs, CreditInputs)
    for name in ("turn_ids", "group_ids", "levels", "tree_ids"):
        assert torch.equal(getattr(inputs, name), getattr(train.batch, name))
    for name in ("turn_rewards", "turn_present", "global_rewards"):
        assert torch.equal(getattr(inputs, name), REWARDS[name])
    assert torch.equal(inputs.mask, train.mask)


def test_two_prompts_do_not_meet():
    """The second is worth half of the first."""
    both = {
        "turn_rewards": torch.cat([REWARDS["turn_rewards"], REWARDS["turn_rewards"] / 2]),
        "turn_present": REWARDS["turn_present"].repeat(2, 1),
        "global_rewards": REWARDS["global_rewards"].repeat(2),
    }
    train = step(trees=(TREE, TREE), rewards=both)
    by_hand = torch.tensor(BY_HAND)
    torch.testing.assert_close(train.advantages, torch.cat([by_hand, by_hand / 2]))
    assert train.weights.sum().item() == pytest.approx(1.0)


def test_a_correction_weighs_tokens_and_leaves_denominators_alone():
    """The sampler gave every token e⁻¹; the learner gives the first row's tokens twice that."""
    plain = step()
    old = plain.streams.old_logprobs.clone()
    old[0] += 2 * LOG2
    loss = {"old_logprobs": "learner", "entropy": EntropyBonus(coefficient=0.5)}
    free = step(old=old, **loss)
    assert free.correction is None and torch.equal(free.weights, plain.weights)
    truncated = step(old=old, correction={"kind": "truncate", "cap": 3}, **loss)
    by_row = torch.tensor([3.0, 1, 1, 1, 1, 1])[:, None]
    torch.testing.assert_close(truncated.weights, plain.weights * by_row)
    torch.testing.assert_close(truncated.entropy_weights, free.entropy_weights * by_row)
    assert truncated.correction.share == pytest.approx(3 / 11)


def test_what_a_correction_masks_is_not_even_computed():
    old = step().streams.old_logprobs.clone()
    old[0, 2] += 2 * LOG2  # one of the three tokens of the first row that learn
    for level, left in (("token", 2), ("sequence", 0)):
        correction = {"kind": "mask", "level": level}
        train = step(old=old, old_logprobs="learner", correction=correction)
        assert train.wanted[0].sum() == (train.weights[0] != 0).sum() == left
        assert torch.equal(train.wanted[1:], step().wanted[1:])


LABELS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])


def labelled(labels=LABELS):
    return dict(REWARDS, labels=labels)


def test_a_confidence_with_an_expected_score_has_no_sampled_credit():
    train = step(rewards=labelled(), expected=ExpectedScore(coefficient=2.0))
    # Row 4 states no confidence, and token 14 of row 5 is its tag.
    assert train.expected.rows.tolist() == [2, 3, 5]
    assert train.expected.starts.tolist() == [7, 7, 6]
    assert train.expected.coefficient == 2.0
    right, wrong = [0.0, 0.75, 1.0], [1.0, 0.75, 0.0]
    torch.testing.assert_close(train.expected.scores, torch.tensor([right, right, wrong]))
    by_hand = torch.tensor(BY_HAND)
    by_hand[train.expected.tokens] = 0
    torch.testing.assert_close(train.advantages, by_hand)
    content = train.batch.contents["confidence"]
    assert torch.equal(train.expected.tokens, content)
    assert not train.wanted[content].any()


def test_a_confidence_without_a_label_keeps_its_sampled_credit():
    labels = LABELS.clone()
    labels[3] = math.nan
    train = step(rewards=labelled(labels), expected=ExpectedScore())
    assert train.expected.rows.tolist() == [2, 5]
    assert train.advantages[3, 7] == step().advantages[3, 7] != 0


def test_a_confidence_that_does_not_learn_has_no_expected_score():
    mask = torch.tensor(BY_HAND) != 0
    mask[3] = False
    train = step(rewards=labelled(), mask=mask, expected=ExpectedScore())
    assert train.expected.rows.tolist() == [2, 5]


def test_expected_scores_change_no_weight():
    train = step(rewards=labelled(), expected=ExpectedScore())
    assert torch.equal(train.weights, step().weights)


def test_confidences_compared_by_label_leave_themselves_out():
    by_label = ConfidenceSpec(baseline="label")
    train = step(
        rewards=labelled(),
        estimator=bound.estimator(
            "two_level", normalize="center", lambda_conf=4.0, confidence=by_label
        ),
    )
    earned = torch.tensor([0.96 - 0.75, 0.75 - 0.96, 0.19 - 0.91, 0.91 - 0.19])
    spread = train.advantages[2:].gather(1, train.mask[2:].int().argmax(dim=1, keepdim=True))[:, 0]
    torch.testing.assert_close(spread, 4 * earned)
    torch.testing.assert_close(train.advantages[:2], torch.tensor(BY_HAND)[:2])
