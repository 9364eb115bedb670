from .experiment import check_file, check_read_spec, read_spec, validate_document
from .inventory import MachinePart, inspect_machine
from .machine import run_preflight_checks
from .rehearsal import rehearse_experiment, run_rehearsal_checks
from .texts import check_texts

__all__ = [
    "MachinePart",
    "check_file",
    "check_read_spec",
    "check_texts",
    "inspect_machine",
    "read_spec",
    "rehearse_experiment",
    "run_preflight_checks",
    "run_rehearsal_checks",
    "validate_document",
]
