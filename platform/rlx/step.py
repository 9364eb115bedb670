"""Credit assignment of one training step: from rewards to advantages and loss weights.

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
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.credit import (
    Credit,
    CreditInputs,
    PlacedRewards,
    place_rewards,
    structured_scores,
    sum_masked_returns,
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

__all__ = [
    "Estimate",
    "RowRewards",
    "RowScores",
    "TokenStreams",
    "TrainBatch",
    "assign_credit",
    "split_mini_batches",
]

Estimate = Callable[[CreditInputs], Tensor | Credit]


@dataclass(frozen=True, eq=False, kw_only=True)
class RowRewards:
    """Rewards of a batch as tensors, in row order.

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
    """Model outputs for a batch's tokens: the inputs of credit assignment besides the rewards.

    Attributes:
        old_logprobs: `[B, T]` nats under the old policy; read only inside the mask.
        reference_logprobs: `[B, T]` nats under the reference policy; None if not needed.
        values: `[B, T]` the critic's estimate before a token; None without a critic.
        greedy_scores: `[B]` score of the greedy answer to the row's prompt; None if not needed.
        step_ids: `[B, T]` int64 reasoning step of a token, from 0, -1 outside; None if not needed.
        mc_values: `[B, S + 1]` Monte-Carlo values at step boundaries; None if not needed.
        beta: β of KL in the reward at this step.
        state: estimator state carried over from the previous step.
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
    """The three scores of a row, `[B]` each.

    Attributes:
        total_score: mean(turn) + Σ global.
        token_level_scores: Σ of the rewards as placed on tokens, before any KL.
        masked_return_sum: Σ of returns over the mask (KG-R1, arXiv 2509.26383).
    """

    total_score: Tensor
    token_level_scores: Tensor
    masked_return_sum: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainBatch:
    """Everything the learner needs for one step, and the intermediate results to record.

    Attributes:
        batch: the rows.
        mask: `[B, T]` bool loss mask.
        advantages: `[B, T]`, 0 outside the mask.
        weights: `[B, T]` aggregation weights, times the correction weights if there are any; the
            step's loss is Σ weights · token loss.
        entropy_weights: `[B, T]` the same for the entropy bonus; all 0 without one.
        wanted: `[B, T]` bool tokens whose log-probability enters the loss; the others need not be
            computed.
        streams: the input streams.
        placed: rewards on tokens, before any KL.
        token_rewards: `[B, T]` token rewards as the estimator reads them.
        kl: `[B, T]` nats, KL from the reference policy by the estimator of `credit.kl_penalty`, 0
            outside the mask; None without a reference.
        returns: `[B, T]` targets of the critic; the advantages if the estimator has no returns.
        scores: the three scores of each row.
        correction: importance weights for the mismatch between sampler and learner; None if off.
        state: estimator state for the next step.
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
        """`[B, T]` bool tokens in the loss mask that the policy sampled."""
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
    """Computes advantages, returns and loss weights of a step's tokens from its rewards.

    Args:
        batch: the rows.
        rewards: rewards of the rows.
        mask: `[B, T]` bool loss mask of the mask strategy.
        streams: log-probabilities, values and other estimator inputs.
        estimator: advantage estimator with its options bound.
        credit: placement, and KL in the reward.
        loss: aggregation, and the entropy bonus.
        max_tokens: token budget of each kind of turn; the divisor of `aggregate: constant` if
            `constant_length` is not set.

    Raises:
        PluginError: the estimator returns a wrong shape, non-finite values, or values outside the
            mask.
        RlxError: KL from the reference policy is not finite.
        ValueError: a reward is not finite.
    """
    placed = _place_batch_rewards(batch, rewards, mask, credit)
    token_rewards, kl = _subtract_kl(placed.token_rewards, mask, streams, credit)
    estimate = estimator(_build_credit_inputs(batch, rewards, mask, token_rewards, streams, credit))
    assigned = _check_credit(
        estimate if isinstance(estimate, Credit) else Credit(advantages=estimate), mask
    )
    returns = assigned.advantages if assigned.returns is None else assigned.returns
    weights, bonus = _compute_loss_weights(batch, mask, loss, max_tokens)
    correction = None
    if loss.correction is not None:
        old, behaviour, own = streams.old_logprobs, batch.behaviour_logprobs, mask & batch.is_own
        correction = compute_correction_weights(old, behaviour, own, loss.correction)
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


def split_mini_batches(
    train: TrainBatch, parts: int, *, loss: LossSpec, max_tokens: Mapping[str, int]
) -> list[TrainBatch]:
    """Splits a batch for several optimizer steps: parts of equally many prompts, in order.

    A part has the whole batch's rows, advantages and returns, but only its own rows learn, and the
    loss averages over these.

    Args:
        train: the batch of a step.
        parts: how many; fewer if the batch has fewer prompts.
        loss, max_tokens: as in `assign_credit`.

    Reference:
        PPO, arXiv 1707.06347, algorithm 1: minibatches.
    """
    if parts == 1:
        return [train]
    trees = train.batch.tree_ids
    return [
        _keep_rows(train, torch.isin(trees, own), loss, max_tokens)
        for own in torch.tensor_split(trees.unique(), parts)
        if len(own)
    ]


def _keep_rows(
    train: TrainBatch, rows: Tensor, loss: LossSpec, max_tokens: Mapping[str, int]
) -> TrainBatch:
    """The batch with the loss of some rows, `[B]` bool."""
    mask = train.mask & rows[:, None]
    weights, bonus = _compute_loss_weights(train.batch, mask, loss, max_tokens)
    if train.correction is not None:
        factors = train.correction.weights
        weights, bonus = weights * factors, bonus * factors
    wanted = train.wanted & rows[:, None]
    return replace(train, mask=mask, weights=weights, entropy_weights=bonus, wanted=wanted)


def _check_credit(credit: Credit, mask: Tensor) -> Credit:
    """Returns `credit` unchanged after checking what every estimator must guarantee.

    Raises:
        PluginError: a tensor has a wrong shape, is not finite, or is nonzero outside the mask.
    """
    for name, tensor in (("advantages", credit.advantages), ("returns", credit.returns)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != mask.shape:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise PluginError(
                f"the estimator returned {name} of shape {found}, not [B, T] = {tuple(mask.shape)}"
            )
        wrong = ~tensor.isfinite() | (~mask & (tensor != 0))
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            where = "" if mask[row, token] else ", which is outside the mask"
            raise PluginError(
                f"the estimator returned {float(tensor[row, token])} in its {name} for token "
                f"{token} of row {row}{where}: `rlx plugins check` tests what an estimator must "
                "guarantee"
            )
    return credit


def _place_batch_rewards(
    batch: TokenBatch, rewards: RowRewards, mask: Tensor, credit: CreditSpec
) -> PlacedRewards:
    """Places rewards on tokens.

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
    """Collects everything that the estimator may read."""
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
        masked_return_sum=sum_masked_returns(returns, mask),
    )


def _subtract_kl(
    rewards: Tensor, mask: Tensor, streams: TokenStreams, credit: CreditSpec
) -> tuple[Tensor, Tensor | None]:
    """Token rewards as the estimator reads them, and the KL; None without a reference."""
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
    """Weights of the token losses and of the entropy bonus."""
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
    """`[B, T]` bool tokens whose log-probability enters the loss with a gradient."""
    signal = (advantages != 0) & (weights != 0)
    if loss.kl is not None:
        return mask.clone()
    if loss.ratio == "sequence":  # a row's ratio is a mean over all of its masked-in tokens
        signal = mask & signal.any(dim=1, keepdim=True)
    return signal | (bonus != 0)
