"""Problems of reasoning-gym, scored by its own scorers."""

from rlx_gyms.reasoning.rewards import ReasoningGymScore
from rlx_gyms.reasoning.task import ReasoningGymTask

__all__ = ["ReasoningGymScore", "ReasoningGymTask"]
