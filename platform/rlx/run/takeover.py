"""Giving a supervisor to a run that has none: it waits in the queue, was stopped, or is lost."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from rlx.run.disk import hold_reserve
from rlx.run.launch import failed_unless_started, start
from rlx.run.paths import RunFolder
from rlx.run.processes import live_ranks, this_machine
from rlx.run.slurm import cancel, is_for_slurm
from rlx.run.slurm import submit as give_to_slurm
from rlx_registry import Registry, RunRecord

__all__ = ["begin", "go_on", "take_up"]


def begin(registry: Registry, run: RunRecord, registry_url: str) -> None:
    """Starts the supervisor of a new run here; one that is queued becomes a job of Slurm."""
    with failed_unless_started(registry, run.id):
        if run.status == "queued":
            give_to_slurm(registry, run, registry_url)
        else:
            registry.update_run(run.id, pid=start(run, registry_url), host=this_machine())


def go_on(registry: Registry, run: RunRecord, registry_url: str, reason: str) -> bool:
    """Gives a run a supervisor: here, or as a job of Slurm where its experiment says so.

    Returns:
        False where somebody else has taken the run, or ended it, meanwhile.
    """
    folder = RunFolder(Path(run.directory or ""))
    if not is_for_slurm(folder):
        return take_up(registry, run, registry_url, reason) is not None
    cancel(folder)
    if not registry.transition(run.id, {run.status}, "queued", reason):
        return False
    with failed_unless_started(registry, run.id):
        hold_reserve(folder.reserve)
        give_to_slurm(registry, run, registry_url)
    return True


def take_up(registry: Registry, run: RunRecord, registry_url: str, reason: str) -> int | None:
    """Starts a supervisor for a run, here.

    Returns:
        Its process id; None where somebody else has taken the run, or ended it, meanwhile.
    """
    folder = RunFolder(Path(run.directory or ""))
    if not registry.transition(run.id, {run.status}, "submitted", reason):
        return None
    for pid in live_ranks(folder.root):  # of a supervisor that was killed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with failed_unless_started(registry, run.id):
        cancel(folder)
        folder.job.unlink(missing_ok=True)
        hold_reserve(folder.reserve)
        pid = start(run, registry_url)
        registry.update_run(run.id, pid=pid, host=this_machine())
    return pid
