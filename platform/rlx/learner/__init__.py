"""The learner: DeepSpeed's engine, prefix sharing, weight export."""

from rlx.learner.distributed import Ranks, join_ranks
from rlx.learner.engine import Learner, UpdateStats, learning_rate

__all__ = ["Learner", "Ranks", "UpdateStats", "join_ranks", "learning_rate"]
