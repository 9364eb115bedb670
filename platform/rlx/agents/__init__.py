"""Agents that are trained as they are shipped: programs that ask the policy for their turns.

`AgentHost` samples rollout trees. It starts the programs, each with an address of its own, answers
their requests from the session of a sampling engine, and records them as rollouts.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
