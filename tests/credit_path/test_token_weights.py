"""Weights of token losses under a correction: which ratios they read, and mini-batches of them."""

import bound
import pytest
import torch
from trees import conversation

from rlx.batch import build_token_batch
from rlx.credit import CreditInputs
from rlx.phase_setup import CreditRules
from rlx.spec import CreditSpec, LossSpec
from rlx.step import ScoredRows, TokenStreams, assign_credit, split_mini_batches

MAX_TOKENS = {"answer": 8}


def give_ones(inputs: CreditInputs) -> torch.Tensor:
    return inputs.mask.float()


def assign(batch, mask, old, *, estimator=give_ones, profile="rlx", **loss):
    """A step in which every turn has the reward 1, and its rules."""
    rewards = {
        "turn_rewards": torch.ones(batch.state_ids.shape),
        "turn_present": batch.state_ids >= 0,
        "global_rewards": torch.zeros(len(batch.rows)),
    }
    rules = CreditRules(
        estimator=estimator,
        credit=CreditSpec(profile=profile),
        loss=LossSpec.model_validate(loss),
        max_tokens=MAX_TOKENS,
    )
    scored = ScoredRows.join(batch, mask, **rewards)
    return assign_credit(scored, TokenStreams(old_logprobs=old), rules), rules


def write(*texts):
    """A batch of an answer to each of as many problems."""
    return build_token_batch([conversation([("answer", text, {}, None)]) for text in texts])


def test_a_mini_batch_weighs_its_entropy_bonus_as_the_whole_step_does():
    batch = write("ab", "c")
    # The learner gives every token twice the sampler's probability.
    double = torch.where(batch.is_own, batch.behaviour_logprobs + torch.tensor(2.0).log(), 0.0)
    whole, rules = assign(
        batch,
        bound.mask("model_tokens")(batch),
        double,
        old_logprobs="learner",
        correction={"kind": "truncate", "level": "token", "cap": 3},
        entropy={"coefficient": 0.5},
    )
    parts = split_mini_batches(whole, 2, rules)
    for row, part in enumerate(parts):
        # One row learns: 0.5 over its tokens, times the ratio of 2 on each.
        own = whole.batch.is_own[row]
        expected = torch.where(own, 2 * 0.5 / own.sum(), 0.0)
        torch.testing.assert_close(part.entropy_weights[row], expected)


def test_rows_without_a_learning_token_count_under_the_profile_of_trl():
    """TRL: `((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()` for grpo, and the sum over
    the number of rows times the limit for dr_grpo; verl leaves such rows out."""
    learns = torch.tensor([3, 0, 2, 0])
    batch = write("abc", "x", "ab", "x")
    mask = batch.is_own & (learns > 0)[:, None]

    def weigh(profile, aggregate, parts=1):
        old = batch.behaviour_logprobs
        train, rules = assign(batch, mask, old, profile=profile, aggregate=aggregate)
        rows = [part.weights.sum(1).tolist() for part in split_mini_batches(train, parts, rules)]
        return [pytest.approx(row) for row in rows]

    limit = MAX_TOKENS["answer"]
    assert weigh("trl", "sequence_mean") == [[1 / 4, 0, 1 / 4, 0]]
    assert weigh("trl", "sequence_mean", 2) == [[1 / 2, 0, 0, 0], [0, 0, 1 / 2, 0]]
    assert weigh("trl", "constant") == [[3 / 4 / limit, 0, 2 / 4 / limit, 0]]
    assert weigh("trl", "token_mean") == [[3 / 5, 0, 2 / 5, 0]]
    assert weigh("verl", "sequence_mean") == [[1 / 2, 0, 1 / 2, 0]]


def test_a_correction_reads_no_ratio_of_tokens_that_nobody_sampled():
    """`all_response` lets observations learn, for which the sampler has no log-probability."""
    turns = [("answer", "ab", {}, "xyz"), ("answer", "c", {}, None)]
    batch = build_token_batch([conversation(turns)])
    train, _ = assign(
        batch,
        bound.mask("all_response")(batch),
        batch.behaviour_logprobs - 3.0 * batch.is_environment,
        old_logprobs="learner",
        correction={"kind": "truncate", "level": "sequence", "cap": 2},
    )
    assert (train.mask & train.batch.is_environment).any(), "observations are in the mask"
    torch.testing.assert_close(train.correction.weights[train.batch.is_own], torch.ones(3))
    assert train.correction.share == 0


def select_wanted(batch, advantages, old, **loss):
    """The tokens that need a log-probability with a gradient, for an estimator's advantages."""
    return assign(batch, batch.is_own, old, estimator=lambda _: advantages, **loss)[0].wanted


def test_a_row_with_a_ratio_of_its_own_is_needed_whole_where_any_token_has_a_signal():
    batch = write("ab", "cd")
    first = batch.is_own & (batch.is_own.cumsum(1) == 1)
    first[1] = False
    for ratio, wanted in (("token", first), ("sequence", first.any(1)[:, None] & batch.is_own)):
        found = select_wanted(batch, first.float(), batch.behaviour_logprobs, ratio=ratio)
        assert found.tolist() == wanted.tolist(), ratio


def test_a_token_that_a_covariance_holds_near_the_old_policy_is_needed_without_an_advantage():
    batch = write("abcd")
    old, advantages = (torch.zeros(batch.is_own.shape) for _ in range(2))
    old[batch.is_own] = torch.tensor([-0.1, -1.0, -1.2, -1.1])
    advantages[batch.is_own] = torch.tensor([0.0, -1.0, -1.0, 0.0])
    # Products of deviations: 0.375, 0.075, 0.175 and -0.125.
    for rule, first in (({"kind": "kl"}, True), ({"kind": "clip", "low": 0.2}, False)):
        covariance = {"fraction": 0.25, **rule}
        wanted = select_wanted(
            batch, advantages, old, aggregate="sequence_sum", covariance=covariance
        )
        assert wanted[batch.is_own].tolist() == [first, True, True, False], rule
