"""Runs as jobs of Slurm: given to it, cancelled in it, and what it alone knows of them.

A job is the supervisor, the same as everywhere, on the first of its nodes; it starts the ranks
through srun. While a job waits, its run is "queued". Slurm may take a job back into its queue, when
a node fails or someone says so: then the run is queued again, and goes on from its checkpoint.

Nothing here needs Slurm's accounting: `scontrol` knows running jobs, and ended ones for a while.
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
"""Seconds that one of Slurm's commands may take."""
RESTARTS = "SLURM_RESTART_COUNT"
"""Variable of a job that Slurm has started before."""
GONE = "Invalid job id"
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"})
WAITING |= {"SPECIAL_EXIT", "RESV_DEL_HOLD"}
ENDED = frozenset({"CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"})
ENDED |= {"BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
JOB_SCRIPT = """\
#!/bin/sh
# Run {run} of rlx, as it was given to sbatch.
exec {python} -m rlx.launch.supervisor {run}
"""


def submit_slurm_job(registry: Registry, run: RunRecord, registry_url: str) -> str:
    """Gives a queued run to Slurm, as a job of its own.

    Returns:
        The job's id, which the run's folder keeps as well.

    Raises:
        EnvironmentFault: there is no Slurm here, or it refuses the job.
    """
    folder = RunFolder(Path(run.directory or ""))
    spec = _load_resolved_spec(folder)
    assert isinstance(spec.runner.launcher, SlurmLauncherSpec)
    script = folder.root / "job.sh"
    script.write_text(JOB_SCRIPT.format(run=run.id, python=shlex.quote(sys.executable)))
    script.chmod(0o755)
    environment = child_environment()
    environment.pop(RESTARTS, None)  # of a job that this is called in
    said = _run_slurm_command(
        ["sbatch", *_build_sbatch_options(spec, spec.runner.launcher, folder, run.id), str(script)],
        {**environment, REGISTRY: registry_url},
    )
    job = said.stdout.strip().split(";")[0]
    if said.returncode or not job.isdecimal():
        refused = escape_unprintable(
            said.stderr.strip().removeprefix("sbatch: error: ").split("\n")[0]
        )
        raise EnvironmentFault(f"sbatch did not take {run.id}: {refused}")
    aside = folder.job.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps({"job": job}))
    aside.replace(folder.job)
    registry.results.add_event(run.id, "slurm", f"given to Slurm as job {job}", {"job": job})
    return job


def is_for_slurm(folder: RunFolder) -> bool:
    """Whether a run's experiment, as its folder has it, wants a job."""
    return isinstance(_load_resolved_spec(folder).runner.launcher, SlurmLauncherSpec)


def cancel_slurm_job(folder: RunFolder) -> None:
    """Ends a run's job, waiting or not; a run that has none is left as it is.

    Raises:
        EnvironmentFault: there is no Slurm here, or it does not answer.
    """
    job = read_job_id(folder)
    if job is None:
        return
    folder.job.unlink(missing_ok=True)  # first: what becomes of that job is nobody's truth any more
    said = _run_slurm_command(["scancel", job])
    if said.returncode and GONE not in said.stderr:
        folder.job.write_text(json.dumps({"job": job}))
        raise EnvironmentFault(f"scancel {job}: {escape_unprintable(said.stderr.strip())}")


def reconcile_slurm_run(registry: Registry, run: RunRecord) -> RunRecord:
    """The run as Slurm knows it: what its job could not record itself is recorded now.

    A run without a job is returned as it is, and so is every other where Slurm does not answer.

    Args:
        registry: may be read-only; it is opened for writing where there is something to record.
        run: as it stands there.
    """
    if run.directory is None or run.status not in ("queued", "running", "lost"):
        return run
    folder = RunFolder(Path(run.directory))
    job = read_job_id(folder)
    if job is None:
        return run
    told = _find_true_status(run.status, job)
    if told is None:
        return run
    status, reason = told
    try:
        with Registry.open(registry.url) as writing:
            if writing.transition(run.id, {run.status}, status, reason) and status != "queued":
                folder.reserve.unlink(missing_ok=True)
            return writing.run(run.id)
    except DatabaseUnwritableError:  # who may only read is shown what is recorded
        return run


def _find_true_status(status: Status, job: str) -> tuple[Status, str] | None:
    """What has become of a run that counts as `status`; None where that is true."""
    state = _query_job_state(job)
    if status == "queued":
        if state in ("CANCELLED", "gone"):
            return "stopped", f"job {job} was cancelled while it waited in Slurm's queue"
        if state in ENDED:
            return "failed", f"job {job} ended before the run had begun: Slurm says {state}"
    if status in ("running", "lost") and state in WAITING:
        return "queued", f"Slurm has taken job {job} back into its queue"
    if status == "running" and (state in ENDED or state == "gone"):
        return "lost", f"job {job} has ended without a word: Slurm says {state}"
    return None


def list_startable_statuses(runner: RunnerSpec, run: RunRecord) -> set[Status]:
    """In which statuses a run may be that its supervisor starts.

    A job that Slurm has taken back finds its run as the former supervisor left it: maybe killed
    with its machine, maybe stopped by Slurm, but not by anybody's request.
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
    """Holds what a former supervisor of the job gave back when it left."""
    if _count_restarts():
        hold_reserve(folder.reserve)


def find_stop_status() -> tuple[Status, str]:
    """How a run ends whose job Slurm has told to end, with nobody's request in the registry."""
    job = os.environ["SLURM_JOB_ID"]
    if int(_query_job_fields(job).get("Restarts", 0)) > _count_restarts():
        return "queued", f"Slurm has taken job {job} back into its queue"
    return "stopped", (
        f"Slurm ended job {job}: scancel, preemption, or its time limit; the log says which"
    )


def _load_resolved_spec(folder: RunFolder) -> ExperimentSpec:
    return ExperimentSpec.model_validate_json(folder.resolved_spec.read_text())


def _count_restarts() -> int:
    """How often Slurm has started this job before."""
    return int(os.environ.get(RESTARTS, 0))


def _build_sbatch_options(
    spec: ExperimentSpec, launcher: SlurmLauncherSpec, folder: RunFolder, run_id: str
) -> list[str]:
    """The options of sbatch: ours, then those of the experiment."""
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
    """The id of a run's newest job; None where it has none."""
    try:
        return str(json.loads(folder.job.read_text())["job"])
    except FileNotFoundError:
        return None


def _query_job_state(job: str) -> str | None:
    """Slurm's word for how a job stands, "gone" where it has forgotten it; None: no answer."""
    return _query_job_fields(job).get("JobState")


def _query_job_fields(job: str) -> dict[str, str]:
    """What Slurm knows of a job, by its own names; nothing where it does not answer."""
    try:
        said = _run_slurm_command(["scontrol", "--oneliner", "show", "job", job])
    except EnvironmentFault:
        return {}
    if said.returncode:
        return {"JobState": "gone"} if GONE in said.stderr else {}
    return dict(re.findall(r"(?:^|\s)(JobState|Restarts)=(\S+)", said.stdout))


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
            f"there is no {command[0]} here: `runner.launcher: slurm` needs a machine from which "
            "jobs are submitted"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"{command[0]} has not answered for {PATIENCE:g} s") from error
