from .page import render_plan_page
from .report import PhaseReport, PlanReport, build_plan, convert_to_json, select_example_rows
from .row_report import RowAccount
from .stored import load_phase_spec, load_run_speech, stored_accounts
from .text import show_plan, show_rows

__all__ = [
    "PhaseReport",
    "PlanReport",
    "RowAccount",
    "build_plan",
    "convert_to_json",
    "load_phase_spec",
    "load_run_speech",
    "render_plan_page",
    "select_example_rows",
    "show_plan",
    "show_rows",
    "stored_accounts",
]
