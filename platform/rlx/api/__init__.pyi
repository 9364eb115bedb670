from .experiments import Experiment, ExperimentPlan, plan_experiment, read, submit, validate
from .groups import (
    GroupMember,
    check_group,
    parse_grid,
    parse_seeds,
    read_group,
    record_group,
    require_group_name,
)
from .results import compare, diff, run_queue, score
from .runs import Run, list_runs, open_run

__all__ = [
    "Experiment",
    "ExperimentPlan",
    "GroupMember",
    "Run",
    "check_group",
    "compare",
    "diff",
    "list_runs",
    "open_run",
    "parse_grid",
    "parse_seeds",
    "plan_experiment",
    "read",
    "read_group",
    "record_group",
    "require_group_name",
    "run_queue",
    "score",
    "submit",
    "validate",
]
