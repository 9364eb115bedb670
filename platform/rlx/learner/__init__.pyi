from .critic import Critic, CriticStats, critic_rate
from .distributed import Ranks, join_ranks
from .forward import PackedPolicy
from .learner import Learner, UpdateStats, learning_rate
from .reference import (
    ReferencePolicy,
    UpdateSeconds,
    build_learner_with_reference,
    time_update,
)
from .universal import convert_checkpoints, load_consolidated_weights

__all__ = [
    "Critic",
    "CriticStats",
    "Learner",
    "PackedPolicy",
    "Ranks",
    "ReferencePolicy",
    "UpdateSeconds",
    "UpdateStats",
    "build_learner_with_reference",
    "convert_checkpoints",
    "critic_rate",
    "join_ranks",
    "learning_rate",
    "load_consolidated_weights",
    "time_update",
]
