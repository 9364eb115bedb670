"""A step's rewards as tensors, row by row."""

from collections.abc import Sequence

import torch

from rlx.batch import TokenBatch
from rlx.reward import RewardTable
from rlx.rollout import RolloutTree
from rlx.step import RowRewards

__all__ = ["build_row_rewards"]


def build_row_rewards(
    batch: TokenBatch, trees: Sequence[RolloutTree], table: RewardTable
) -> RowRewards:
    """Weighted sums of the table's rewards, turn number k at column k - 1; absent is not zero."""
    shape = tuple(batch.state_ids.shape)
    turns, present = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    whole = torch.zeros(shape[0])
    for b, row in enumerate(batch.rows):
        whole[b] = table.get_rollout_total((row.tree, row.segment)) or 0.0
        for segment in row.turns:
            total = table.get_turn_total((row.tree, segment))
            if total is not None:
                at = trees[row.tree].segments[segment].turn - 1
                turns[b, at], present[b, at] = total, True
    return RowRewards(turn_rewards=turns, turn_present=present, global_rewards=whole)
