"""The public API for plugin authors. It imports neither torch nor any other heavy package.

A plugin is a frozen Pydantic model: its fields are its options in YAML, and `rlx plugins` prints
the first line of its docstring. A distribution registers it under an entry-point group:

    rlx.tasks        Task        where problems come from
    rlx.environments Environment what answers between turns
    rlx.rewards      Reward      what a turn is worth
    rlx.estimators   Estimator   how rewards become advantages
    rlx.masks        Mask        which tokens learn
    rlx.placements   Placement   which tokens receive rewards
    rlx.schedules    Schedule    which turns a rollout has, and how they are sampled
    rlx.samplers     SamplerPlugin   the settings of an engine that samples
    rlx.launchers    LauncherPlugin  the settings of what starts the ranks of a run
    rlx.trackers     TrackerPlugin   the settings of what shows runs beside the registry

The built-in plugins are registered the same way.
"""

from rlx.plugin.answer_cache import keep_answers_in, recall, sum_costs
from rlx.plugin.base import (
    API,
    LARGEST,
    PLUGIN_FAULT,
    Count,
    Estimator,
    LauncherPlugin,
    Mask,
    Placement,
    Plugin,
    PluginSection,
    Reading,
    SamplerPlugin,
    StrictModel,
    Use,
    expand_path,
)
from rlx.plugin.environment import (
    FAILED,
    Action,
    Environment,
    Episode,
    Reply,
    SessionLostError,
    SessionState,
    StatefulEnvironment,
    Step,
    ToolCall,
    close_sessions,
    has_sessions,
)
from rlx.plugin.reward import Example, Reward, RewardPlugin, Sample, Scope, Score, reward
from rlx.plugin.schedule import (
    DynamicSampling,
    PromptLimit,
    Schedule,
    TurnLevel,
    TurnSpec,
    WorkedExample,
    find_answer_level,
)
from rlx.plugin.task import (
    Canonical,
    Corrupts,
    Demonstration,
    ListsProblems,
    Message,
    Problem,
    Rehearsed,
    Split,
    StandsIn,
    StatesConfidence,
    Task,
    get_confidence_values,
)
from rlx.plugin.tracker import TrackedPoint, TrackedRun, Tracker, TrackerPlugin
from rlx.text import find_last_block, get_last_block

__all__ = [
    "API",
    "FAILED",
    "LARGEST",
    "PLUGIN_FAULT",
    "Action",
    "Canonical",
    "Corrupts",
    "Count",
    "Demonstration",
    "DynamicSampling",
    "Environment",
    "Episode",
    "Estimator",
    "Example",
    "LauncherPlugin",
    "ListsProblems",
    "Mask",
    "Message",
    "Placement",
    "Plugin",
    "PluginSection",
    "Problem",
    "PromptLimit",
    "Reading",
    "Rehearsed",
    "Reply",
    "Reward",
    "RewardPlugin",
    "Sample",
    "SamplerPlugin",
    "Schedule",
    "Scope",
    "Score",
    "SessionLostError",
    "SessionState",
    "Split",
    "StandsIn",
    "StatefulEnvironment",
    "StatesConfidence",
    "Step",
    "StrictModel",
    "Task",
    "ToolCall",
    "TrackedPoint",
    "TrackedRun",
    "Tracker",
    "TrackerPlugin",
    "TurnLevel",
    "TurnSpec",
    "Use",
    "WorkedExample",
    "close_sessions",
    "expand_path",
    "find_answer_level",
    "find_last_block",
    "get_confidence_values",
    "get_last_block",
    "has_sessions",
    "keep_answers_in",
    "recall",
    "reward",
    "sum_costs",
]
