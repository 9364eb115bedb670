"""Runs as Slurm jobs: submits and cancels them, and records what only Slurm knows about them.

A job is the usual supervisor, on the job's first node; it starts the ranks through srun. While a
job is pending, its run is "queued". Slurm may requeue a job when a node fails or a user asks for
it: the run is then queued again and resumes from its checkpoint.

Slurm's accounting is not required: `scontrol` knows running jobs, and ended ones for a while.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.errors import EnvironmentFault
from rlx.home import REGISTRY, RunFolder
from rlx.launch.disk import hold_reserve
from rlx.launch.submission import child_environment
from rlx.spec import ExperimentSpec, RunnerSpec, SlurmLauncherSpec
from rlx.text import escape_unprintable
from rlx_registry import DatabaseUnwritableError, Registry, RunRecord, Status

__all__ = [
    "cancel_slurm_job",
    "find_stop_status",
    "is_for_slurm",
    "list_startable_statuses",
    "read_job_id",
    "reconcile_slurm_run",
    "restore_disk_reserve",
    "submit_slurm_job",
]

PATIENCE = 30.0
"""Timeout of a Slurm command in seconds."""
RESTARTS = "SLURM_RESTART_COUNT"
"""Environment variable of a restarted job: how often Slurm has restarted it."""
GONE = "Invalid job id"
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"})
WAITING |= {"SPECIAL_EXIT", "RESV_DEL_HOLD"}
ENDED = frozenset({"CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"})
ENDED |= {"BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
JOB_SCRIPT = """\
#!/bin/sh
# Run {run} of rlx, as submitted to sbatch.
exec {python} -m rlx.launch.supervisor {run}
"""


def submit_slurm_job(registry: Registry, run: RunRecord, registry_url: str) -> str:
    """Submits a queued run to Slurm as a job.

    Returns:
        The job's id, which is also written to the run's folder.

    Raises:
        EnvironmentFault: Slurm is not installed here, or sbatch rejects the job.
    """
    folder = RunFolder(Path(run.directory or ""))
    spec = _load_resolved_spec(folder)
    assert isinstance(spec.runner.launcher, SlurmLauncherSpec)
    script = folder.root / "job.sh"
    script.write_text(JOB_SCRIPT.format(run=run.id, python=shlex.quote(sys.executable)))
    script.chmod(0o755)
    environment = child_environment()
    environment.pop(RESTARTS, None)  # set if this process runs in a restarted job
    result = _run_slurm_command(
        ["sbatch", *_build_sbatch_options(spec, spec.runner.launcher, folder, run.id), str(script)],
        {**environment, REGISTRY: registry_url},
    )
    job = result.stdout.strip().split(";")[0]
    if result.returncode or not job.isdecimal():
        refused = escape_unprintable(
            result.stderr.strip().removeprefix("sbatch: error: ").split("\n")[0]
        )
        raise EnvironmentFault(f"sbatch rejected {run.id}: {refused}")
    aside = folder.job.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps({"job": job}))
    aside.replace(folder.job)
    registry.results.add_event(run.id, "slurm", f"submitted to Slurm as job {job}", {"job": job})
    return job


def is_for_slurm(folder: RunFolder) -> bool:
    """Whether the experiment in a run's folder uses the Slurm launcher."""
    return isinstance(_load_resolved_spec(folder).runner.launcher, SlurmLauncherSpec)


def cancel_slurm_job(folder: RunFolder) -> None:
    """Cancels a run's job, pending or running; does nothing if the run has no job.

    Raises:
        EnvironmentFault: Slurm is not installed here, does not answer, or scancel fails.
    """
    job = read_job_id(folder)
    if job is None:
        return
    folder.job.unlink(missing_ok=True)  # first: the job's state must not count any more
    result = _run_slurm_command(["scancel", job])
    if result.returncode and GONE not in result.stderr:
        folder.job.write_text(json.dumps({"job": job}))
        raise EnvironmentFault(f"scancel {job}: {escape_unprintable(result.stderr.strip())}")


def reconcile_slurm_run(registry: Registry, run: RunRecord) -> RunRecord:
    """Updates a run from the state of its Slurm job, if the job could not record it itself.

    A run without a job is returned unchanged, and so is any run if Slurm does not answer.

    Args:
        registry: may be read-only; it is reopened for writing if there is something to record.
        run: as the registry has it.
    """
    if run.directory is None or run.status not in ("queued", "running", "lost"):
        return run
    folder = RunFolder(Path(run.directory))
    job = read_job_id(folder)
    if job is None:
        return run
    change = _find_true_status(run.status, job)
    if change is None:
        return run
    status, reason = change
    try:
        with Registry.open(registry.url) as writing:
            if writing.transition(run.id, {run.status}, status, reason) and status != "queued":
                folder.reserve.unlink(missing_ok=True)
            return writing.run(run.id)
    except DatabaseUnwritableError:  # without write access, return the run as recorded
        return run


def _find_true_status(status: Status, job: str) -> tuple[Status, str] | None:
    """The status and reason that the job's state implies; None if `status` is correct."""
    state = _query_job_state(job)
    if status == "queued":
        if state in ("CANCELLED", "gone"):
            return "stopped", f"job {job} was cancelled while pending in Slurm's queue"
        if state in ENDED:
            return "failed", f"job {job} ended before the run started: its Slurm state is {state}"
    if status in ("running", "lost") and state in WAITING:
        return "queued", f"Slurm requeued job {job}"
    if status == "running" and (state in ENDED or state == "gone"):
        return "lost", f"job {job} ended without recording a result: its Slurm state is {state}"
    return None


def list_startable_statuses(runner: RunnerSpec, run: RunRecord) -> set[Status]:
    """Statuses from which a supervisor may start its run.

    A requeued job finds its run as the previous supervisor left it. That one may have been killed
    with its machine or stopped by Slurm, but not by a user's request.
    """
    if not isinstance(runner.launcher, SlurmLauncherSpec):
        return {"submitted"}
    if not _count_restarts():
        return {"queued"}
    found: set[Status] = {"queued", "running", "lost"}
    if run.request is None and run.attempt:
        found.add("stopped")
    return found


def restore_disk_reserve(folder: RunFolder) -> None:
    """Recreates the disk reserve that the job's previous supervisor deleted on exit."""
    if _count_restarts():
        hold_reserve(folder.reserve)


def find_stop_status() -> tuple[Status, str]:
    """Status and reason of a run whose job Slurm ended without a request in the registry."""
    job = os.environ["SLURM_JOB_ID"]
    if int(_query_job_fields(job).get("Restarts", 0)) > _count_restarts():
        return "queued", f"Slurm requeued job {job}"
    return "stopped", (
        f"Slurm ended job {job}: scancel, preemption, or its time limit; see the log"
    )


def _load_resolved_spec(folder: RunFolder) -> ExperimentSpec:
    return ExperimentSpec.model_validate_json(folder.resolved_spec.read_text())


def _count_restarts() -> int:
    """How often Slurm has restarted this job."""
    return int(os.environ.get(RESTARTS, 0))


def _build_sbatch_options(
    spec: ExperimentSpec, launcher: SlurmLauncherSpec, folder: RunFolder, run_id: str
) -> list[str]:
    """Options of sbatch: rlx's own, then those of the experiment."""
    log = str(folder.log).replace("%", "%%")
    ours: dict[str, str | int | bool] = {
        "parsable": True,
        "job-name": spec.name,
        "comment": f"rlx {run_id}",
        "nodes": launcher.nodes,
        "ntasks-per-node": 1,
        "chdir": str(Path.cwd()),
        "output": log,
        "open-mode": "append",
        "export": "ALL",
        "requeue": True,
    }
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in [*ours.items(), *launcher.options.items()]
        if value is not False
    ]


def read_job_id(folder: RunFolder) -> str | None:
    """The id of a run's latest Slurm job; None if it has none."""
    try:
        return str(json.loads(folder.job.read_text())["job"])
    except FileNotFoundError:
        return None


def _query_job_state(job: str) -> str | None:
    """Slurm's state of a job; "gone" if Slurm no longer knows it, None if Slurm does not answer."""
    return _query_job_fields(job).get("JobState")


def _query_job_fields(job: str) -> dict[str, str]:
    """Fields of a job by Slurm's names; empty if Slurm does not answer."""
    try:
        result = _run_slurm_command(["scontrol", "--oneliner", "show", "job", job])
    except EnvironmentFault:
        return {}
    if result.returncode:
        return {"JobState": "gone"} if GONE in result.stderr else {}
    return dict(re.findall(r"(?:^|\s)(JobState|Restarts)=(\S+)", result.stdout))


def _run_slurm_command(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    options: dict[str, Any] = {} if environment is None else {"env": environment}
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
            start_new_session=True,
            **options,
        )
    except FileNotFoundError as error:
        raise EnvironmentFault(
            f"{command[0]} not found: `runner.launcher: slurm` needs a machine that can submit "
            "Slurm jobs"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"{command[0]} did not answer within {PATIENCE:g} s") from error
