"""Tasksets of verifiers, in an interpreter of their own: its pins conflict with those of rlx."""

from rlx_gyms.verifiers.environment import VerifiersEnvironment
from rlx_gyms.verifiers.task import VerifiersTask

__all__ = ["VerifiersEnvironment", "VerifiersTask"]
