"""One step of training, as the algorithm reads.

trees      = sample(problems)                              rollout, sampler
rewards    = score(trees)                                  reward
batch      = rows of tokens                                batch
mask       = which tokens learn                            mask
streams    = log-probabilities, values                     learner
placed     = rewards on tokens                             credit.place
rewards    = placed - β · KL                               kl, where KL is part of the reward
advantages = estimator(rewards, mask, groups, streams)     credit
weights    = aggregation, times learner/sampler            loss
loss       = Σ weight · (surrogate(ratio, advantages) + penalty) - entropy bonus
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.credit import (
    Credit,
    CreditInputs,
    PlacedRewards,
    place_rewards,
    returns_score,
    structured_scores,
    sum_token_rewards,
)
from rlx.errors import PluginError, RlxError
from rlx.kl import kl_terms, subtract_kl_penalty
from rlx.loss import (
    CorrectionWeights,
    aggregation_weights,
    compute_correction_weights,
    entropy_weights,
)
from rlx.spec import CreditSpec, LossSpec

__all__ = ["Estimate", "RowRewards", "RowScores", "TokenStreams", "TrainBatch", "assign_credit"]

Estimate = Callable[[CreditInputs], Tensor | Credit]


@dataclass(frozen=True, eq=False, kw_only=True)
class RowRewards:
    """A batch's rewards as tensors, in its row order.

    Attributes:
        turn_rewards: `[B, K]` weighted sums; 0 where not present.
        turn_present: `[B, K]` bool.
        global_rewards: `[B]` weighted sums; 0 where a row has none.
    """

    turn_rewards: Tensor
    turn_present: Tensor
    global_rewards: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenStreams:
    """What models and samplers say about a batch's tokens before any credit is given.

    Attributes:
        old_logprobs: `[B, T]` nats under the policy that counts as old; read only in the mask.
        reference_logprobs: `[B, T]` nats under the reference policy; None where nothing asks.
        values: `[B, T]` the critic's estimate before a token; None without a critic.
        greedy_scores: `[B]` score of the greedy answer to the row's prompt; None likewise.
        step_ids: `[B, T]` int64 step of a token, from 0, -1 outside; None likewise, as is
        mc_values: `[B, S + 1]` Monte-Carlo values at the borders of steps.
        beta: β of KL in the reward at this step.
        state: what the estimator carried on from the step before.
    """

    old_logprobs: Tensor
    reference_logprobs: Tensor | None = None
    values: Tensor | None = None
    greedy_scores: Tensor | None = None
    step_ids: Tensor | None = None
    mc_values: Tensor | None = None
    beta: float = 0.0
    state: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class RowScores:
    """The three scores of a row, `[B]` each (design 000, section 1.2 step 6, and its correction).

    Attributes:
        total_score: mean(turn) + Σ global.
        token_level_scores: Σ of the rewards as placed on tokens, before any KL.
        seed_returns_score: what the source calls its score, Σ of returns over the mask.
    """

    total_score: Tensor
    token_level_scores: Tensor
    seed_returns_score: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainBatch:
    """What the learner needs, and what there is to tell about it.

    Attributes:
        batch: the rows.
        mask: `[B, T]` bool tokens that learn.
        advantages: `[B, T]`, 0 outside the mask.
        weights: `[B, T]` aggregation weights, times the correction's where there is one; the step's
            loss is Σ weights · token loss.
        entropy_weights: `[B, T]` weights of the entropy bonus, likewise; all 0 without one.
        wanted: `[B, T]` bool tokens whose log-probability enters the loss; the others need not be
            computed.
        streams: as they were given.
        placed: rewards on tokens, before any KL.
        token_rewards: `[B, T]` what the estimator saw.
        kl: `[B, T]` nats, KL from the reference policy by the estimator of `credit.kl_penalty`, 0
            outside the mask; None without a reference.
        returns: `[B, T]` what the critic learns to predict; the advantages where there is none.
        scores: three scores of each row.
        correction: what makes up for another policy's having sampled; None where nothing does.
        state: what the estimator carries on to the next step.
    """

    batch: TokenBatch
    mask: Tensor
    advantages: Tensor
    weights: Tensor
    entropy_weights: Tensor
    wanted: Tensor
    streams: TokenStreams
    placed: PlacedRewards
    token_rewards: Tensor
    kl: Tensor | None
    returns: Tensor
    scores: RowScores
    correction: CorrectionWeights | None
    state: Mapping[str, float]

    @property
    def sampled_mask(self) -> Tensor:
        """`[B, T]` bool tokens that learn and that the policy sampled."""
        return self.mask & self.batch.is_own


def assign_credit(
    batch: TokenBatch,
    rewards: RowRewards,
    mask: Tensor,
    streams: TokenStreams,
    *,
    estimator: Estimate,
    credit: CreditSpec,
    loss: LossSpec,
    max_tokens: Mapping[str, int],
) -> TrainBatch:
    """Carries a step's rewards to its tokens.

    Args:
        batch: the rows.
        rewards: theirs.
        mask: `[B, T]` bool of the mask strategy.
        streams: what was measured.
        estimator: with its options.
        credit: placement, and KL in the reward.
        loss: aggregation, and the entropy bonus.
        max_tokens: of each kind of turn; what `aggregate: constant` divides by where not told.
    """
    placed = _place_batch_rewards(batch, rewards, mask, credit)
    token_rewards, kl = _subtract_kl(placed.token_rewards, mask, streams, credit)
    given = estimator(_build_credit_inputs(batch, rewards, mask, token_rewards, streams, credit))
    assigned = _check_credit(given if isinstance(given, Credit) else Credit(advantages=given), mask)
    returns = assigned.advantages if assigned.returns is None else assigned.returns
    weights, bonus = _compute_loss_weights(batch, mask, loss, max_tokens)
    correction = None
    if loss.correction is not None:
        old, behaviour = streams.old_logprobs, batch.behaviour_logprobs
        correction = compute_correction_weights(
            old, behaviour, mask & batch.is_own, loss.correction
        )
        weights, bonus = weights * correction.weights, bonus * correction.weights
    return TrainBatch(
        batch=batch,
        mask=mask,
        advantages=assigned.advantages,
        weights=weights,
        entropy_weights=bonus,
        wanted=_select_gradient_tokens(assigned.advantages, weights, bonus, mask, loss),
        streams=streams,
        placed=placed,
        token_rewards=token_rewards,
        kl=kl,
        returns=returns,
        scores=_compute_row_scores(rewards, placed, returns, mask),
        correction=correction,
        state=assigned.state,
    )


def _check_credit(given: Credit, mask: Tensor) -> Credit:
    """The same, if it is what an estimator promises.

    Raises:
        PluginError: it has another shape, is not finite, or speaks of tokens outside the mask.
    """
    for name, tensor in (("advantages", given.advantages), ("returns", given.returns)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != mask.shape:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise PluginError(
                f"the estimator gave {name} of shape {found}, not [B, T] = {tuple(mask.shape)}"
            )
        wrong = ~tensor.isfinite() | (~mask & (tensor != 0))
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            where = "" if mask[row, token] else ", which is outside the mask"
            raise PluginError(
                f"the estimator gave {float(tensor[row, token])} among its {name}, to token "
                f"{token} of row {row}{where}: `rlx plugins check` has the promises it must keep"
            )
    return given


def _place_batch_rewards(
    batch: TokenBatch, rewards: RowRewards, mask: Tensor, credit: CreditSpec
) -> PlacedRewards:
    """Rewards on tokens.

    Raises:
        ValueError: a reward is not finite.
    """
    for tensor in (rewards.turn_rewards[rewards.turn_present], rewards.global_rewards):
        if not torch.isfinite(tensor).all():
            raise ValueError("a reward is not finite: scoring must have turned it into an absence")
    return place_rewards(
        rewards.turn_rewards,
        rewards.turn_present,
        rewards.global_rewards,
        batch.turn_ids,
        mask,
        placement=credit.resolved_placement,
        turn_reduce=credit.turn_reduce,
        on_missing_turn=credit.on_missing_turn,
    )


def _build_credit_inputs(
    batch: TokenBatch,
    rewards: RowRewards,
    mask: Tensor,
    token_rewards: Tensor,
    streams: TokenStreams,
    credit: CreditSpec,
) -> CreditInputs:
    """All that the estimator may look at."""
    return CreditInputs(
        turn_rewards=rewards.turn_rewards,
        turn_present=rewards.turn_present,
        global_rewards=rewards.global_rewards,
        token_rewards=token_rewards,
        turn_ids=batch.turn_ids,
        mask=mask,
        group_ids=batch.group_ids,
        levels=batch.levels,
        tree_ids=batch.tree_ids,
        state_ids=batch.state_ids,
        score_source=credit.score_source,
        values=streams.values,
        old_logprobs=streams.old_logprobs,
        reference_logprobs=streams.reference_logprobs,
        greedy_scores=streams.greedy_scores,
        step_ids=streams.step_ids,
        mc_values=streams.mc_values,
        state=streams.state,
    )


def _compute_row_scores(
    rewards: RowRewards, placed: PlacedRewards, returns: Tensor, mask: Tensor
) -> RowScores:
    return RowScores(
        total_score=structured_scores(
            rewards.turn_rewards, rewards.turn_present, rewards.global_rewards
        ),
        token_level_scores=sum_token_rewards(placed.token_rewards, mask),
        seed_returns_score=returns_score(returns, mask),
    )


def _subtract_kl(
    rewards: Tensor, mask: Tensor, streams: TokenStreams, credit: CreditSpec
) -> tuple[Tensor, Tensor | None]:
    """Token rewards as the estimator sees them, and KL where a reference is known."""
    old, reference = streams.old_logprobs, streams.reference_logprobs
    if reference is None:
        return rewards, None
    kl = torch.where(mask, kl_terms(old, reference, credit.kl_penalty), 0.0)
    if not kl.isfinite().all():
        raise RlxError("KL from the reference policy is not finite: a model gives no probability")
    if not credit.use_kl_in_reward:
        return rewards, kl
    less = subtract_kl_penalty(
        rewards, old, reference, mask, beta=streams.beta, kind=credit.kl_penalty
    )
    return less, kl


def _compute_loss_weights(
    batch: TokenBatch, mask: Tensor, loss: LossSpec, max_tokens: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """Weights of token losses, and of the entropy bonus."""
    lengths = [loss.constant_length or max_tokens[row.kind] for row in batch.rows]
    weights = aggregation_weights(
        mask,
        batch.levels,
        aggregate=loss.aggregate,
        per_turn=loss.per_turn,
        constant_lengths=torch.tensor(lengths),
    )
    bonus = torch.zeros_like(weights)
    if loss.entropy is not None:
        span = loss.entropy.span
        content = mask if span is None else batch.contents.get(span, torch.zeros_like(mask)) & mask
        bonus = entropy_weights(content, loss.entropy.coefficient)
    return weights, bonus


def _select_gradient_tokens(
    advantages: Tensor, weights: Tensor, bonus: Tensor, mask: Tensor, loss: LossSpec
) -> Tensor:
    """Tokens whose log-probability enters the loss with a gradient."""
    signal = (advantages != 0) & (weights != 0)
    if loss.kl is not None:
        return mask.clone()
    if loss.ratio == "sequence":  # the ratio of a row is a mean over all of its learning tokens
        signal = mask & signal.any(dim=1, keepdim=True)
    return signal | (bonus != 0)
