from .checks import check_file, check_read_spec, read_spec, validate_document
from .machine import inspect_machine, run_preflight_checks
from .memory import count_reference_parameters, load_model_shape
from .rehearsal_checks import run_rehearsal_checks
from .report import PhaseReport, PlanReport, build_plan, convert_to_json, select_example_rows
from .row_accounts import RowAccount, build_row_accounts
from .tables import show_plan, show_rows
from .texts import find_missing_parts, require_showable_texts

__all__ = [
    "PhaseReport",
    "PlanReport",
    "RowAccount",
    "build_plan",
    "build_row_accounts",
    "check_file",
    "check_read_spec",
    "convert_to_json",
    "count_reference_parameters",
    "find_missing_parts",
    "inspect_machine",
    "load_model_shape",
    "read_spec",
    "require_showable_texts",
    "run_preflight_checks",
    "run_rehearsal_checks",
    "select_example_rows",
    "show_plan",
    "show_rows",
    "validate_document",
]
