from .hosting import build_rollout_host
from .programs import (
    ProgramStarter,
    compute_command_digests,
)
from .requests import AgentRequests
from .sampling import AgentHost

__all__ = [
    "AgentHost",
    "AgentRequests",
    "ProgramStarter",
    "build_rollout_host",
    "compute_command_digests",
]
