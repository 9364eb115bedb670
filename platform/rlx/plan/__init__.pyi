from .checks import check_file, check_read_spec, read_spec, validate_document
from .machine import MachinePart, inspect_machine, run_preflight_checks
from .memory import (
    USABLE_GIB,
    LevelTokens,
    MemoryEstimate,
    TokenBudget,
    compute_gpu_shares,
    estimate_finish_bytes,
    estimate_step_memory,
    estimate_update_bytes,
    get_usable_share,
    token_budget,
)
from .model_shape import ModelShape, estimate_checkpoint_bytes, load_model_shape
from .page import render_plan_page
from .rehearsal import rehearse_experiment, run_rehearsal_checks
from .report import PhaseReport, PlanReport, build_plan, convert_to_json, select_example_rows
from .row_accounts import RowAccount, load_phase_spec, load_run_speech, stored_accounts
from .stand_ins import load_plan_problems, load_speech
from .stopping_bias import BIASES, Bias, find_stopping_bias, list_bias_reasons
from .text import show_plan, show_rows
from .texts import check_texts, require_showable_texts
from .trial import PlanTrial, run_trial

__all__ = [
    "BIASES",
    "USABLE_GIB",
    "Bias",
    "LevelTokens",
    "MachinePart",
    "MemoryEstimate",
    "ModelShape",
    "PhaseReport",
    "PlanReport",
    "PlanTrial",
    "RowAccount",
    "TokenBudget",
    "build_plan",
    "check_file",
    "check_read_spec",
    "check_texts",
    "compute_gpu_shares",
    "convert_to_json",
    "estimate_checkpoint_bytes",
    "estimate_finish_bytes",
    "estimate_step_memory",
    "estimate_update_bytes",
    "find_stopping_bias",
    "get_usable_share",
    "inspect_machine",
    "list_bias_reasons",
    "load_model_shape",
    "load_phase_spec",
    "load_plan_problems",
    "load_run_speech",
    "load_speech",
    "read_spec",
    "rehearse_experiment",
    "render_plan_page",
    "require_showable_texts",
    "run_preflight_checks",
    "run_rehearsal_checks",
    "run_trial",
    "select_example_rows",
    "show_plan",
    "show_rows",
    "stored_accounts",
    "token_budget",
    "validate_document",
]
