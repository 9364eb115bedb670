"""One step of training, as the algorithm reads.

trees      = sample(problems)                      rollout, sampler
rewards    = score(trees)                          reward
batch      = rows of tokens                        batch
mask       = which tokens learn                    mask
advantages = estimator(rewards, mask, groups)      credit
loss       = Σ weight · surrogate(ratio, advantages) - entropy bonus
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.credit import CreditInputs
from rlx.loss import aggregation_weights, entropy_weights
from rlx.spec import LossSpec

__all__ = ["RowRewards", "TrainBatch", "assign_credit"]


@dataclass(frozen=True, eq=False, kw_only=True)
class RowRewards:
    """A batch's rewards as tensors, in its row order.

    Attributes:
        turn_rewards: `[B, K]` weighted sums; 0 where not present.
        turn_present: `[B, K]` bool.
        global_rewards: `[B]` weighted sums.
    """

    turn_rewards: Tensor
    turn_present: Tensor
    global_rewards: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainBatch:
    """What the learner needs: rows, and for every token what it is worth and how much it counts.

    Attributes:
        batch: the rows.
        mask: `[B, T]` bool tokens that learn.
        advantages: `[B, T]`, 0 outside the mask.
        weights: `[B, T]` aggregation weights; the step's loss is Σ weights · token loss.
        entropy_weights: `[B, T]` weights of the entropy bonus; all 0 without one.
    """

    batch: TokenBatch
    mask: Tensor
    advantages: Tensor
    weights: Tensor
    entropy_weights: Tensor


def assign_credit(
    batch: TokenBatch,
    rewards: RowRewards,
    *,
    mask: Callable[[TokenBatch], Tensor],
    estimator: Callable[[CreditInputs], Tensor],
    loss: LossSpec,
) -> TrainBatch:
    """Carries a step's rewards to its tokens."""
    learns = mask(batch)
    if not torch.isfinite(rewards.turn_rewards[rewards.turn_present]).all():
        raise ValueError("a reward is not finite: scoring must have turned it into an absence")
    inputs = CreditInputs(
        turn_rewards=rewards.turn_rewards,
        turn_present=rewards.turn_present,
        global_rewards=rewards.global_rewards,
        turn_ids=batch.turn_ids,
        mask=learns,
        group_ids=batch.group_ids,
        levels=batch.levels,
        tree_ids=batch.tree_ids,
    )
    kinds = sorted({row.kind for row in batch.rows})
    bonus = torch.zeros_like(batch.behaviour_logprobs)
    if loss.entropy and loss.entropy.span in batch.contents:
        content = batch.contents[loss.entropy.span] & learns
        bonus = entropy_weights(content, loss.entropy.coefficient)
    return TrainBatch(
        batch=batch,
        mask=learns,
        advantages=estimator(inputs),
        weights=aggregation_weights(
            learns,
            torch.tensor([kinds.index(row.kind) for row in batch.rows]),
            aggregate=loss.aggregate,
            per_turn=loss.per_turn,
        ),
        entropy_weights=bonus,
    )
