"""Games of TextArena, alone or against an opponent that draws its moves from a list."""

from rlx_gyms.textarena.environment import TextArenaEnvironment
from rlx_gyms.textarena.task import TextArenaTask

__all__ = ["TextArenaEnvironment", "TextArenaTask"]
