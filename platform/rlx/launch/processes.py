"""Finds the processes of a run by their command lines."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from rlx.home import RunFolder
from rlx_registry import (
    HEARTBEAT_LIMIT,
    RunRecord,
    is_supervisor_alive,
    is_supervisor_in_other_container,
)

__all__ = [
    "has_ended",
    "has_lost_supervisor",
    "is_abandoned",
    "is_half_made",
    "is_job",
    "is_rank",
    "is_supervised",
    "is_supervisor",
    "list_live_ranks",
    "this_machine",
]

_RANK = "rlx.launch.rank"
"""Module on the command lines of ranks, and of a torchrun that starts them."""
_LOOKS = 200
_PAUSE = 0.01
"""Looks at a process without a command line, and seconds between them."""


def this_machine() -> str:
    """The host name under which the registry records this machine's processes and devices."""
    return socket.gethostname()


def has_ended(pid: int) -> bool:
    """Whether a process has ended, also if its parent has not collected it yet (a zombie)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def is_abandoned(run: RunRecord) -> bool:
    """Whether a run that is recorded as active has lost its supervisor.

    On other machines, a run is lost when its heartbeat stops (see `effective_status`).
    """
    lost = run.effective_status == "lost"
    return lost or is_half_made(run) or has_lost_supervisor(run)


def has_lost_supervisor(run: RunRecord) -> bool:
    """Whether this machine sees that the process of an active run is gone.

    That is its supervisor, or the submission that has not started one yet. A job system knows the
    state of its jobs, and may restart them.
    """
    if run.status not in ("queued", "submitted", "running") or run.pid is None or is_job(run):
        return False
    alive = None if run.status == "queued" else is_supervisor_alive(run.directory)
    if alive is None:
        alive = run.host not in (None, this_machine()) or is_supervised(run)
        alive = alive or is_supervisor_in_other_container(run.directory)
    return not alive


def is_half_made(run: RunRecord) -> bool:
    """Whether a run was recorded, but its submission was killed before its folder was complete.

    Versions of rlx that recorded a run first could leave such runs.
    """
    if run.status not in ("queued", "submitted") or time.time() - run.created < HEARTBEAT_LIMIT:
        return False
    if run.directory is None:
        return True
    folder = RunFolder(Path(run.directory))
    return folder.root.is_dir() and not folder.resolved_spec.exists()


def is_supervised(run: RunRecord) -> bool:
    """Whether a run's process is alive: its supervisor, or the submission that starts it."""
    if run.pid is None or is_supervisor(run.pid, run.id):
        return run.pid is not None
    if run.status == "running" or run.attempt:
        return False
    try:
        process = psutil.Process(run.pid)  # of the submission, unless its id was used again
        alive = process.status() != psutil.STATUS_ZOMBIE
        return bool(alive and process.create_time() <= run.created)
    except psutil.Error:
        return False


def is_job(run: RunRecord) -> bool:
    """Whether a job system has taken a run."""
    return run.directory is not None and RunFolder(Path(run.directory)).job.exists()


def is_supervisor(pid: int, run_id: str) -> bool:
    """Whether `pid` is alive and still the supervisor of that run: process ids are reused.

    A process has no command line for the moment in which it becomes another program.
    """
    try:
        process = psutil.Process(pid)
        command, looks = process.cmdline(), _LOOKS
        while not command and looks:
            time.sleep(_PAUSE)
            command, looks = process.cmdline(), looks - 1
    except psutil.Error:
        return False
    return "rlx.launch.supervisor" in command and run_id in command


def is_rank(process: psutil.Process, mark: str) -> bool:
    """Whether a process is a rank, or the launcher of ranks, and has `mark` on its command line.

    Raises:
        psutil.Error: it has ended, or is another user's.
    """
    command = process.cmdline()
    return mark in command and _RANK in command


def list_live_ranks(folder: Path, supervisor: int | None = None) -> Iterator[int]:
    """Process ids of a run's live ranks, and of their launcher if they have one.

    They are recognised by the run's folder in their command lines, which differs between homes.
    Every rank is in its own process group, so one that is killed leaves the others running.

    Args:
        supervisor: only the ranks of this supervisor; a later attempt on this machine has others.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if not is_rank(process, str(folder)):
                continue
            if supervisor in (None, int(process.environ().get("RLX_SUPERVISOR", 0))):
                yield process.pid
