from .lines import (
    ScoredLine,
    build_reward,
    open_response_lines,
    score_lines,
)
from .plugin_process import JobOutcome, RewardJob
from .pool import (
    PooledHost,
    RewardPool,
    SessionHost,
    host_environment,
)
from .scoring import (
    NamedReward,
    Place,
    RewardEntry,
    RewardTable,
    compute_mean_value,
    rescore_rollouts,
    score_rollouts,
    sum_named_rewards,
)

__all__ = [
    "JobOutcome",
    "NamedReward",
    "Place",
    "PooledHost",
    "RewardEntry",
    "RewardJob",
    "RewardPool",
    "RewardTable",
    "ScoredLine",
    "SessionHost",
    "build_reward",
    "compute_mean_value",
    "host_environment",
    "open_response_lines",
    "rescore_rollouts",
    "score_lines",
    "score_rollouts",
    "sum_named_rewards",
]
