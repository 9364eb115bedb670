"""Scoring: named rewards of a step, computed by plugins in processes that can be killed."""

from rlx.reward.table import NamedReward, RewardEntry, RewardTable, score
from rlx.reward.workers import Job, Outcome, RewardPool

__all__ = ["Job", "NamedReward", "Outcome", "RewardEntry", "RewardPool", "RewardTable", "score"]
