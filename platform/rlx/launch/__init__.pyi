from .device_slots import build_device_request, gpus_here
from .devices import DeviceShortage, diagnose_devices, query_nvidia_driver, torch_build
from .disk import LITTLE, format_disk_space, free_bytes, hold_reserve
from .failures import convert_to_rlx_error
from .launchers import check_hostfile, ranks_here
from .packages import Package, list_packages
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
    "check_hostfile",
    "child_environment",
    "collect_code_version",
    "collect_environment_versions",
    "continue_run",
    "convert_to_rlx_error",
    "diagnose_devices",
    "format_disk_space",
    "free_bytes",
    "gpus_here",
    "has_lost_supervisor",
    "hold_reserve",
    "is_abandoned",
    "is_half_made",
    "is_supervised",
    "is_supervisor",
    "launch_run",
    "list_live_ranks",
    "list_packages",
    "on_slurm",
    "query_nvidia_driver",
    "ranks_here",
    "read_job_id",
    "reconcile_slurm_run",
    "registry_url",
    "submit_run",
    "take_over_run",
    "this_machine",
    "torch_build",
]
