"""One training step, in the order in which things happen.

rollouts   = sample(prompts), several per prompt; score(every turn, every rollout)
mask       = the tokens that learn
streams    = log-probabilities under the old and the reference policy, values of a critic
placed     = rewards on tokens, less β · KL from the reference policy
advantages = estimator(placed), most often within the rollouts of one prompt
weights    = aggregation over tokens and rows, times learner/sampler
update     : minimise Σ weight · (surrogate(ratio, advantage) + penalty) - entropy bonus
"""

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from rlx.assignment import (
    build_expected_scores,
    build_scored_rows,
    complete_inputs,
    compute_row_scores,
    compute_token_weights,
    drop_sampled_credit,
    estimate_credit,
    place_row_rewards,
    subtract_kl,
)
from rlx.phase_setup import PhaseSetup
from rlx.reward import RewardTable
from rlx.rollout import RolloutTree
from rlx.train_batch import CreditRules, ScoredRows, TokenStreams, TrainBatch


class Rollouts(Protocol):
    """Sampled trees with their rewards."""

    @property
    def trees(self) -> Sequence[RolloutTree]:
        """In the order in which their problems were drawn."""

    @property
    def table(self) -> RewardTable:
        """Rewards of the trees."""

    def find_untrained_rows(self) -> Collection[tuple[int, int]]:
        """Rows to leave out, each as `(tree, segment)` of its last turn."""


R = TypeVar("R", bound=Rollouts)
L = TypeVar("L", covariant=True)


class Actors(Protocol[R, L]):
    """The sampler, the models and the learner of a rank; `L` is what an update tells."""

    def sample_and_score(self) -> R:
        """Samples and scores the rollouts of the step."""

    def compute_streams(self, rollouts: R, rows: ScoredRows) -> TokenStreams:
        """Computes what the estimator and the loss read besides the rewards."""

    def update_models(self, train: TrainBatch) -> L:
        """Takes the step's optimizer steps."""


class StepResult(NamedTuple, Generic[R, L]):
    """Result of a step: its rollouts, the trained batch and the update; None if nothing trained."""

    rollouts: R
    train: TrainBatch | None
    learned: L | None


def run_step(actors: Actors[R, L], setup: PhaseSetup) -> StepResult[R, L]:
    """Samples, scores, masks, assigns credit and updates.

    Args:
        actors: the sampler, the models and the learner of this rank.
        setup: the phase's rewards, mask, estimator and loss.
    """
    rollouts = actors.sample_and_score()
    rows = build_scored_rows(
        setup, rollouts.trees, rollouts.table, without=rollouts.find_untrained_rows()
    )
    if rows is None:  # no rollout could be scored
        return StepResult(rollouts, None, None)
    streams = actors.compute_streams(rollouts, rows)
    train = assign_credit(rows, streams, setup.rules)
    learned = actors.update_models(train)  # the critic first; in mini-batches if asked for
    return StepResult(rollouts, train, learned)


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
