"""From rewards to advantages and loss weights, in the order of a training step.

rollouts   = sample(prompts), several per prompt; score(every turn, every rollout)
mask       = the tokens that learn
streams    = log-probabilities under the old and the reference policy, values of a critic
placed     = rewards on tokens, less β · KL from the reference policy
advantages = estimator(placed), most often within the rollouts of one prompt
weights    = aggregation over tokens and rows, times learner/sampler
update     : minimise Σ weight · (surrogate(ratio, advantage) + penalty) - entropy bonus

`rlx.run` samples and updates. All between is here: `rlx plan`, check and rescoring do it, too.
"""

from rlx.credit_assignment import (
    build_expected_scores,
    complete_inputs,
    compute_row_scores,
    compute_token_weights,
    drop_sampled_credit,
    estimate_credit,
    place_row_rewards,
    subtract_kl,
)
from rlx.train_batch import CreditRules, ScoredRows, TokenStreams, TrainBatch


def assign_credit(rows: ScoredRows, streams: TokenStreams, rules: CreditRules) -> TrainBatch:
    """From the rewards of a batch to advantages, returns and loss weights of its tokens.

    Raises:
        PluginError: the estimator returns a wrong shape, non-finite values, or values outside the
            mask.
        RlxError: KL from the reference policy is not finite.
        ValueError: a reward is not finite.
    """
    mask = rows.mask
    placed = place_row_rewards(rows, rules)
    token_rewards, kl = subtract_kl(placed.token_rewards, mask, streams, rules.credit)
    inputs = complete_inputs(rows.rewards, token_rewards, streams, rules.credit)
    credit = estimate_credit(rules.estimator, inputs)
    expected = build_expected_scores(rows, rules)
    advantages = drop_sampled_credit(credit.advantages, expected)
    returns = advantages if credit.returns is None else credit.returns
    weights = compute_token_weights(rows, advantages, streams, rules)
    return TrainBatch(
        batch=rows.batch,
        mask=mask,
        streams=streams,
        placed=placed,
        token_rewards=token_rewards,
        kl=kl,
        advantages=advantages,
        returns=returns,
        scores=compute_row_scores(rows.rewards, placed, returns, mask),
        state=credit.state,
        expected=expected,
        **weights._asdict(),
    )
