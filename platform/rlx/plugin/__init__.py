"""The public API for plugin authors. It imports neither torch nor any other heavy package.

A plugin is a frozen Pydantic model: its fields are its options in YAML, and `rlx plugins` prints
the first line of its docstring. A distribution registers it under an entry-point group:

    rlx.tasks        Task        where problems come from
    rlx.environments Environment what answers between turns
    rlx.rewards      Reward      what a turn is worth
    rlx.estimators   Estimator   how rewards become advantages
    rlx.masks        Mask        which tokens learn
    rlx.placements   Placement   which tokens receive rewards

The built-in plugins are registered the same way.
"""

from rlx.plugin.base import API, Plugin, Use
from rlx.plugin.credit import Estimator, Mask, Placement, Reading
from rlx.plugin.environment import FAILED, Action, Environment, Episode, Step
from rlx.plugin.reward import Example, Reward, RewardPlugin, Sample, Scope, Score, reward
from rlx.plugin.stateful import Reply, StatefulEnvironment
from rlx.plugin.task import (
    Canonical,
    Corrupts,
    Demonstration,
    Problem,
    Rehearsed,
    Split,
    StandsIn,
    StatesConfidence,
    Task,
    get_confidence_values,
)

__all__ = [
    "API",
    "FAILED",
    "Action",
    "Canonical",
    "Corrupts",
    "Demonstration",
    "Environment",
    "Episode",
    "Estimator",
    "Example",
    "Mask",
    "Placement",
    "Plugin",
    "Problem",
    "Reading",
    "Rehearsed",
    "Reply",
    "Reward",
    "RewardPlugin",
    "Sample",
    "Scope",
    "Score",
    "Split",
    "StandsIn",
    "StatefulEnvironment",
    "StatesConfidence",
    "Step",
    "Task",
    "Use",
    "get_confidence_values",
    "reward",
]
