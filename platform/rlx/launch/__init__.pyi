from .device_slots import build_device_request
from .devices import DeviceShortage
from .disk import LITTLE, format_disk_space, free_bytes
from .failures import convert_to_rlx_error
from .packages import Package, list_packages
from .preflight import find_cuda_lack, run_preflight_checks, vllm_package
from .processes import (
    has_lost_supervisor,
    is_abandoned,
    is_half_made,
    is_supervised,
    is_supervisor,
    list_live_ranks,
    on_slurm,
    this_machine,
)
from .slurm import cancel_slurm_job, read_job_id, reconcile_slurm_run
from .submission import (
    child_environment,
    collect_code_version,
    collect_environment_versions,
    registry_url,
    submit_run,
)
from .takeover import attempts_used, continue_run, launch_run, take_over_run

__all__ = [
    "LITTLE",
    "DeviceShortage",
    "Package",
    "attempts_used",
    "build_device_request",
    "cancel_slurm_job",
    "child_environment",
    "collect_code_version",
    "collect_environment_versions",
    "continue_run",
    "convert_to_rlx_error",
    "find_cuda_lack",
    "format_disk_space",
    "free_bytes",
    "has_lost_supervisor",
    "is_abandoned",
    "is_half_made",
    "is_supervised",
    "is_supervisor",
    "launch_run",
    "list_live_ranks",
    "list_packages",
    "on_slurm",
    "read_job_id",
    "reconcile_slurm_run",
    "registry_url",
    "run_preflight_checks",
    "submit_run",
    "take_over_run",
    "this_machine",
    "vllm_package",
]
