from .experiment import check_file, check_read_spec, read_spec, validate_document
from .inventory import MachinePart, inspect_machine
from .machine import run_preflight_checks
from .rehearsal import rehearse_experiment, run_rehearsal_checks
from .stopping_bias import BIASES, Bias, find_stopping_bias, list_bias_reasons
from .texts import check_texts, require_showable_texts

__all__ = [
    "BIASES",
    "Bias",
    "MachinePart",
    "check_file",
    "check_read_spec",
    "check_texts",
    "find_stopping_bias",
    "inspect_machine",
    "list_bias_reasons",
    "read_spec",
    "rehearse_experiment",
    "require_showable_texts",
    "run_preflight_checks",
    "run_rehearsal_checks",
    "validate_document",
]
