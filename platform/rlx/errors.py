"""Every exception rlx raises on purpose, and the exit code each one ends a command with.

* RlxError               1  a run failed, or rlx has a bug
  x SpecError            2  the YAML or the command line asks for something impossible
  x PluginError          3  a plugin is missing, broken, or too new
  x EnvironmentFault     4  this machine lacks something: a device, a package, model files, disk
  x RegistryError        5  the registry of runs cannot be read or written
  x ShapeError           1  two tensors disagree; whoever built them has a bug
  x TreeError            1  a rollout tree is malformed; whoever grew it has a bug
  x RewardError          1  a reward failed under the policy `on_error: fail`

Built-in exceptions (ValueError, TypeError) are for misuse of a single function.
"""

from typing import ClassVar

__all__ = [
    "EnvironmentFault",
    "PluginError",
    "RegistryError",
    "RewardError",
    "RlxError",
    "ShapeError",
    "SpecError",
    "TreeError",
]


class RlxError(Exception):
    """Base of every deliberate rlx failure."""

    exit_code: ClassVar[int] = 1


class SpecError(RlxError):
    """The experiment spec, or an argument, asks for something impossible."""

    exit_code = 2


class PluginError(RlxError):
    """A plugin is missing, ambiguous, broken, or wants a newer rlx."""

    exit_code = 3


class EnvironmentFault(RlxError):
    """The machine lacks what the experiment needs."""

    exit_code = 4


class RegistryError(RlxError):
    """The registry of runs cannot be read or written."""

    exit_code = 5


class ShapeError(RlxError):
    """Two tensors disagree about a named dimension."""


class TreeError(RlxError):
    """A rollout tree is malformed."""


class RewardError(RlxError):
    """A reward plugin failed, and the spec says that this ends the run."""
