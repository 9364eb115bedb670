from .check import AuditReport, IdentityTally, Violation, check_run
from .comparison import (
    Comparison,
    ComparisonRow,
    build_comparison_json,
    build_comparison_tables,
    compare_recipes,
    find_named_runs,
    find_side_differences,
    format_comparison_markdown,
    format_setting,
    list_comparison_notes,
    load_diff_side,
    select_newest_runs,
)
from .evaluating import (
    ModelProbe,
    SuiteEvaluation,
    build_requested_suite,
    build_set_spec,
    evaluate,
    probe_model,
)
from .export import export_model, push_model, write_card
from .models import ModelTrial, OpenModel, TrainedModel, open_served_model, try_model
from .other_tools import ToolEvaluation, evaluate_with
from .rescoring import Rescoring, rescore
from .stored_steps import StepAccounts, load_step_accounts, select_rollout_steps

__all__ = [
    "AuditReport",
    "Comparison",
    "ComparisonRow",
    "IdentityTally",
    "ModelProbe",
    "ModelTrial",
    "OpenModel",
    "Rescoring",
    "StepAccounts",
    "SuiteEvaluation",
    "ToolEvaluation",
    "TrainedModel",
    "Violation",
    "build_comparison_json",
    "build_comparison_tables",
    "build_requested_suite",
    "build_set_spec",
    "check_run",
    "compare_recipes",
    "evaluate",
    "evaluate_with",
    "export_model",
    "find_named_runs",
    "find_side_differences",
    "format_comparison_markdown",
    "format_setting",
    "list_comparison_notes",
    "load_diff_side",
    "load_step_accounts",
    "open_served_model",
    "probe_model",
    "push_model",
    "rescore",
    "select_newest_runs",
    "select_rollout_steps",
    "try_model",
    "write_card",
]
