"""The learner: DeepSpeed's engine, prefix sharing, weight export; its reference and its critic."""

from rlx.learner.critic import Critic, CriticStats, critic_rate
from rlx.learner.distributed import Ranks, join_ranks
from rlx.learner.learner import Learner, learning_rate
from rlx.learner.reference import ReferencePolicy, build_learner_with_reference
from rlx.learner.terms import UpdateStats

__all__ = [
    "Critic",
    "CriticStats",
    "Learner",
    "Ranks",
    "ReferencePolicy",
    "UpdateStats",
    "build_learner_with_reference",
    "critic_rate",
    "join_ranks",
    "learning_rate",
]
