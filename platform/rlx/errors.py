"""Every exception that rlx raises on purpose, with the exit code of a command that ends with it.

* RlxError               1  a run failed, or rlx has a bug
  x SpecError            2  the YAML or the command line asks for something impossible
  x PluginError          3  a plugin is missing, broken, or requires a newer rlx
  x EnvironmentFault     4  this machine lacks something: a device, a package, model files, disk
  x RegistryError        5  the run registry cannot be read or written
  x ShapeError           1  two tensors disagree in shape; the code that built them has a bug
  x TreeError            1  a rollout tree is malformed; the code that built it has a bug
  x RewardError          1  a reward failed under the policy `on_error: fail`
  x DivergedModelError   1  the model's weights or logits are not finite

Built-in exceptions (ValueError, TypeError) are for misuse of a single function.
"""

from typing import ClassVar

__all__ = [
    "DivergedModelError",
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
    """Base class of every exception that rlx raises on purpose."""

    exit_code: ClassVar[int] = 1


class SpecError(RlxError):
    """The experiment spec, or an argument, asks for something impossible."""

    exit_code = 2


class PluginError(RlxError):
    """A plugin is missing, ambiguous or broken, or requires a newer rlx."""

    exit_code = 3


class EnvironmentFault(RlxError):
    """The machine lacks what the experiment needs."""

    exit_code = 4


class RegistryError(RlxError):
    """The run registry cannot be read or written."""

    exit_code = 5


class ShapeError(RlxError):
    """Two tensors disagree about a named dimension."""


class TreeError(RlxError):
    """A rollout tree is malformed."""


class RewardError(RlxError):
    """A reward plugin failed, and the spec sets `on_error: fail`."""


class DivergedModelError(RlxError):
    """A model's weights, or the logits that it computes, are not finite."""
