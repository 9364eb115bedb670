from .experiment import check_file, check_read_spec, read_spec, validate_document
from .inventory import MachinePart, inspect_machine
from .machine import run_preflight_checks
from .texts import check_texts
from .trial import check_trial

__all__ = [
    "MachinePart",
    "check_file",
    "check_read_spec",
    "check_texts",
    "check_trial",
    "inspect_machine",
    "read_spec",
    "run_preflight_checks",
    "validate_document",
]
