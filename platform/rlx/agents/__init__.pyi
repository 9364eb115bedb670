from .programs import (
    AgentProgram,
    EndedProgram,
    ProgramRunner,
    compute_command_digests,
)
from .requests import AgentRequests
from .sampling import AgentHost

__all__ = [
    "AgentHost",
    "AgentProgram",
    "AgentRequests",
    "EndedProgram",
    "ProgramRunner",
    "compute_command_digests",
]
