"""Convert a step's reward table into per-row tensors."""

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
    """Sums the table's weighted rewards per row.

    Turn number k is at column k - 1. A missing turn reward is marked in `turn_present`, since it
    is not the same as a reward of 0.
    """
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
