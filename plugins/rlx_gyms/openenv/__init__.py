"""Client of running OpenEnv servers, by their WebSocket protocol; needs no package of OpenEnv."""

from rlx_gyms.openenv.environment import OpenEnvEnvironment
from rlx_gyms.openenv.task import OpenEnvTask

__all__ = ["OpenEnvEnvironment", "OpenEnvTask"]
