"""The rewards of a step's trees, and values of its states, as tensors in the order of its rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.reward import RewardTable
from rlx.rollout import RolloutTree
from rlx.step import RowRewards

__all__ = ["of_states", "of_tokens", "row_rewards"]


def row_rewards(batch: TokenBatch, trees: Sequence[RolloutTree], table: RewardTable) -> RowRewards:
    """Weighted sums of the table's rewards, turn number k at column k - 1; absent is not zero."""
    shape = tuple(batch.state_ids.shape)
    turns, present = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    whole = torch.zeros(shape[0])
    for b, row in enumerate(batch.rows):
        whole[b] = table.overall((row.tree, row.segment)) or 0.0
        for segment in row.turns:
            total = table.total((row.tree, segment))
            if total is not None:
                at = trees[row.tree].segments[segment].turn - 1
                turns[b, at], present[b, at] = total, True
    return RowRewards(turn_rewards=turns, turn_present=present, global_rewards=whole)


def of_tokens(step_ids: Tensor, values: Tensor) -> Tensor:
    """`[B, T]` value of the state that each token's step begins in, 0 where it has no step."""
    known = step_ids >= 0
    return torch.where(known, values.gather(1, step_ids.clamp(min=0)), 0.0)


def of_states(step_ids: Tensor, per_token: Tensor) -> Tensor:
    """`[B, S + 1]` again from `of_tokens`: a step has tokens, and the last state is worth 0."""
    steps = int(step_ids.max()) + 1
    nowhere = torch.where(step_ids < 0, steps + 1, step_ids)
    values = per_token.new_zeros(len(step_ids), steps + 2)
    return values.scatter(1, nowhere, per_token)[:, : steps + 1]
