"""Environments of Gymnasium with discrete actions, as texts, and their exact optimum."""

from rlx_gyms.gymnasium.environment import GymnasiumEnvironment
from rlx_gyms.gymnasium.optimum import compute_action_values
from rlx_gyms.gymnasium.task import GymnasiumTask

__all__ = ["GymnasiumEnvironment", "GymnasiumTask", "compute_action_values"]
