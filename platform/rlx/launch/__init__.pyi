from .device_slots import build_device_request, gpus_here
from .devices import (
    DeviceShortage,
    diagnose_devices,
    list_device_names,
    query_nvidia_driver,
    torch_build,
)
from .disk import LITTLE, format_disk_space, free_bytes, hold_reserve
from .failures import convert_to_rlx_error
from .jobs import cancel_job, read_job_id, reconcile_job
from .launcher import (
    JobLauncher,
    Launcher,
    LocalLauncher,
    build_torchrun_command,
    open_launcher,
)
from .packages import Package, list_packages
from .processes import (
    has_lost_supervisor,
    is_abandoned,
    is_half_made,
    is_job,
    is_supervised,
    is_supervisor,
    list_live_ranks,
    this_machine,
)
from .queue import run_queue
from .ray_launcher import RayLauncher
from .removal import Removal, plan_removal, remove_run_data
from .resume_trial import VICTIMS, KillResult, ResumeTrialReport, run_resume_trial
from .run_access import (
    BROKEN_OFF,
    KILLED,
    RUN_LIKE,
    choose_run_exit_code,
    create_missing_registry,
    end_orphaned_run,
    find_runs,
    get_registry_url,
    get_run_exit_code,
    is_spec_of_run,
    list_group_runs,
    locate_run_folder,
    open_registry,
)
from .signals import delay_interrupts
from .slurm import SlurmLauncher
from .start import find_finished_runs, start_experiment, stop_run
from .submission import (
    child_environment,
    collect_code_version,
    collect_environment_versions,
    describe_new_run,
    registry_url,
    submit_run,
)
from .takeover import attempts_used, continue_run, launch_run, start_job, take_over_run
from .watch import watch_run

__all__ = [
    "BROKEN_OFF",
    "KILLED",
    "LITTLE",
    "RUN_LIKE",
    "VICTIMS",
    "DeviceShortage",
    "JobLauncher",
    "KillResult",
    "Launcher",
    "LocalLauncher",
    "Package",
    "RayLauncher",
    "Removal",
    "ResumeTrialReport",
    "SlurmLauncher",
    "attempts_used",
    "build_device_request",
    "build_torchrun_command",
    "cancel_job",
    "child_environment",
    "choose_run_exit_code",
    "collect_code_version",
    "collect_environment_versions",
    "continue_run",
    "convert_to_rlx_error",
    "create_missing_registry",
    "delay_interrupts",
    "describe_new_run",
    "diagnose_devices",
    "end_orphaned_run",
    "find_finished_runs",
    "find_runs",
    "format_disk_space",
    "free_bytes",
    "get_registry_url",
    "get_run_exit_code",
    "gpus_here",
    "has_lost_supervisor",
    "hold_reserve",
    "is_abandoned",
    "is_half_made",
    "is_job",
    "is_spec_of_run",
    "is_supervised",
    "is_supervisor",
    "launch_run",
    "list_device_names",
    "list_group_runs",
    "list_live_ranks",
    "list_packages",
    "locate_run_folder",
    "open_launcher",
    "open_registry",
    "plan_removal",
    "query_nvidia_driver",
    "read_job_id",
    "reconcile_job",
    "registry_url",
    "remove_run_data",
    "run_queue",
    "run_resume_trial",
    "start_experiment",
    "start_job",
    "stop_run",
    "submit_run",
    "take_over_run",
    "this_machine",
    "torch_build",
    "watch_run",
]
