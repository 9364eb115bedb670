from .experiment import check_file, check_read_spec, read_spec, validate_document
from .machine import find_cuda_lack, run_preflight_checks, vllm_package
from .texts import check_texts
from .trial import check_trial

__all__ = [
    "check_file",
    "check_read_spec",
    "check_texts",
    "check_trial",
    "find_cuda_lack",
    "read_spec",
    "run_preflight_checks",
    "validate_document",
    "vllm_package",
]
