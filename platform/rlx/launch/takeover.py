"""Giving a supervisor to a run that has none: it waits in the queue, was stopped, or is lost."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from rlx.home import RunFolder
from rlx.launch.disk import hold_reserve
from rlx.launch.processes import list_live_ranks, this_machine
from rlx.launch.slurm import cancel_slurm_job, is_for_slurm
from rlx.launch.slurm import submit_slurm_job as give_to_slurm
from rlx.launch.submission import fail_unless_started, put_spec, start_supervisor
from rlx.spec import ExperimentSpec, SlurmLauncherSpec
from rlx_registry import Registry, RunRecord

__all__ = ["BY_HAND", "attempts_used", "continue_run", "launch_run", "take_over_run"]

BY_HAND = "resumed"
"""Why a run waits again that somebody has resumed: its attempts are counted anew."""


def attempts_used(registry: Registry, run_id: str) -> int:
    """How often a run has been started since it was submitted, or last resumed by hand."""
    changes = registry.history(run_id)
    before = [change.attempt for change in changes if change.reason == BY_HAND]
    return changes[-1].attempt - (before[-1] if before else 0)


def launch_run(registry: Registry, run: RunRecord, registry_url: str) -> None:
    """Starts the supervisor of a new run here; one that is queued becomes a job of Slurm."""
    with fail_unless_started(registry, run.id):
        if run.status == "queued":
            give_to_slurm(registry, run, registry_url)
        else:
            registry.update_run(
                run.id, pid=start_supervisor(run, registry_url), host=this_machine()
            )


def continue_run(
    registry: Registry, run: RunRecord, registry_url: str, changed: ExperimentSpec | None
) -> bool:
    """Gives a run a supervisor as its owner wants: here, or as a job of Slurm.

    Args:
        changed: the experiment on other ranks; None where it stays as it is.

    Returns:
        False where somebody else has taken the run, or ended it, meanwhile.
    """
    folder = RunFolder(Path(run.directory or ""))
    slurm = (
        is_for_slurm(folder)
        if changed is None
        else isinstance(changed.runner.launcher, SlurmLauncherSpec)
    )
    if not slurm:
        return take_over_run(registry, run, registry_url, BY_HAND, changed) is not None
    if not registry.transition(run.id, {run.status}, "queued", BY_HAND):
        return False
    with fail_unless_started(registry, run.id):
        cancel_slurm_job(
            folder
        )  # the job that the run had before; nobody shall ask Slurm about that one
        if changed is not None:
            put_spec(folder, changed)
        hold_reserve(folder.reserve)
        give_to_slurm(registry, run, registry_url)
    return True


def take_over_run(
    registry: Registry,
    run: RunRecord,
    registry_url: str,
    reason: str,
    changed: ExperimentSpec | None = None,
) -> int | None:
    """Starts a supervisor for a run, here.

    Returns:
        Its process id; None where somebody else has taken the run, or ended it, meanwhile.
    """
    folder = RunFolder(Path(run.directory or ""))
    if not registry.transition(run.id, {run.status}, "submitted", reason):
        return None
    for pid in list_live_ranks(folder.root):  # of a supervisor that was killed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with fail_unless_started(registry, run.id):
        cancel_slurm_job(folder)
        if changed is not None:
            put_spec(folder, changed)
        hold_reserve(folder.reserve)
        pid = start_supervisor(run, registry_url)
        registry.update_run(run.id, pid=pid, host=this_machine())
    return pid
