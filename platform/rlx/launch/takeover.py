"""Starts a supervisor for a run that has none: a queued, stopped or lost one."""

import os
import signal
from contextlib import suppress

from rlx.home import RunFolder
from rlx.launch.disk import hold_reserve
from rlx.launch.jobs import leave_job, reconcile_job, submit_job
from rlx.launch.processes import has_lost_supervisor, is_job, list_live_ranks, this_machine
from rlx.launch.run_access import locate_run_folder
from rlx.launch.signals import delay_interrupts
from rlx.launch.stored_spec import load_resolved_spec, put_spec
from rlx.launch.submission import fail_unless_started, start_supervisor
from rlx.spec import ExperimentSpec
from rlx_registry import (
    RESUMED,
    Registry,
    RunRecord,
    Status,
    forget_supervisor,
)

__all__ = ["attempts_used", "continue_run", "launch_run", "start_job", "take_over_run"]


def attempts_used(registry: Registry, run_id: str) -> int:
    """Number of attempts since a run was submitted, or last resumed by a user."""
    changes = registry.history(run_id)
    before = [change.attempt for change in changes if change.reason == RESUMED]
    return changes[-1].attempt - (before[-1] if before else 0)


def launch_run(registry: Registry, run: RunRecord, registry_url: str) -> None:
    """Starts the supervisor of a new run here, or submits a queued run as a job."""
    with fail_unless_started(registry, run.id):
        if run.status == "queued":
            submit_job(registry, run, registry_url)
        else:
            registry.update_run(
                run.id, pid=start_supervisor(run, registry_url), host=this_machine()
            )


def start_job(registry: Registry, run: RunRecord, registry_url: str) -> None:
    """Submits a run as a job if it needs one: it was just recorded here, the process that has
    recorded it was killed, or its job was lost. Does nothing for a run that is no job.

    Raises:
        EnvironmentFault: the job system is not installed here, or rejects the job; the run stays
            queued, and may be submitted later.
    """
    folder = locate_run_folder(run)
    if not load_resolved_spec(folder).runner.launcher.submits_jobs:
        return
    run = reconcile_job(registry, run)
    is_ours = run.pid is None or (run.pid == os.getpid() and run.host == this_machine())
    if run.status == "lost":
        continue_run(registry, run, registry_url, None)
    elif run.status == "queued" and not is_job(run) and (is_ours or has_lost_supervisor(run)):
        registry.update_run(run.id, pid=os.getpid(), host=this_machine())
        submit_job(registry, run, registry_url)


def continue_run(
    registry: Registry, run: RunRecord, registry_url: str, changed: ExperimentSpec | None
) -> bool:
    """Resumes a run where its launcher puts it: on this machine, or as a job.

    Args:
        changed: the experiment with other ranks, devices or engine; None if it is unchanged.

    Returns:
        False if the run has been taken over or ended elsewhere in the meantime.
    """
    folder = locate_run_folder(run)
    spec = changed or load_resolved_spec(folder)
    if not spec.runner.launcher.submits_jobs:
        return take_over_run(registry, run, registry_url, RESUMED, changed) is not None
    with delay_interrupts():
        if not _claim_run(registry, run, folder, "queued", RESUMED):
            return False
        with fail_unless_started(registry, run.id):
            leave_job(registry, run, folder)  # whose state must not count any more
            if changed is not None:
                put_spec(folder, changed)
            hold_reserve(folder.reserve)
            submit_job(registry, run, registry_url)
    return True


def take_over_run(
    registry: Registry,
    run: RunRecord,
    registry_url: str,
    reason: str,
    changed: ExperimentSpec | None = None,
) -> int | None:
    """Starts a supervisor for a run on this machine.

    Returns:
        Its process id; None if the run has been taken over or ended elsewhere in the meantime.
    """
    folder = locate_run_folder(run)
    with delay_interrupts():
        if not _claim_run(registry, run, folder, "submitted", reason):
            return None
        return _start_claimed_run(registry, run, folder, registry_url, changed)


def _claim_run(
    registry: Registry, run: RunRecord, folder: RunFolder, status: Status, reason: str
) -> bool:
    """Moves a run to a status, unless something has happened to it since it was read.

    The earlier supervisor is forgotten before others see the new status, in which the next one
    would be taken for dead until it has started.
    """
    with registry.write_atomically():
        claimed = registry.transition(run.id, {run.status}, status, reason, seen=run)
        if claimed:
            forget_supervisor(folder.root)
    return claimed


def _start_claimed_run(
    registry: Registry,
    run: RunRecord,
    folder: RunFolder,
    registry_url: str,
    changed: ExperimentSpec | None,
) -> int:
    with fail_unless_started(registry, run.id):
        for pid in list_live_ranks(folder.root):  # left by a supervisor that was killed
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        leave_job(registry, run, folder)
        if changed is not None:
            put_spec(folder, changed)
        hold_reserve(folder.reserve)
        pid = start_supervisor(run, registry_url)
        registry.update_run(run.id, pid=pid, host=this_machine())
    return pid
