"""Finds the processes of a run by their command lines."""

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from rlx.home import RunFolder
from rlx_registry import RunRecord

__all__ = ["is_abandoned", "is_supervisor", "list_live_ranks", "on_slurm", "this_machine"]


def this_machine() -> str:
    """The host name under which the registry records this machine's processes and devices."""
    return socket.gethostname()


def is_abandoned(run: RunRecord) -> bool:
    """Whether a run that is recorded as active has lost its supervisor.

    Processes can be checked on this machine only. On other machines, a run is lost when its
    heartbeat stops (see `effective_status`). Slurm knows the state of its jobs, and may restart
    them.
    """
    if run.effective_status == "lost":
        return True
    if run.status not in ("submitted", "running") or run.pid is None or on_slurm(run):
        return False
    return run.host in (None, this_machine()) and not is_supervisor(run.pid, run.id)


def on_slurm(run: RunRecord) -> bool:
    """Whether a run is a Slurm job."""
    return run.directory is not None and RunFolder(Path(run.directory)).job.exists()


def is_supervisor(pid: int, run_id: str) -> bool:
    """Whether `pid` is alive and still the supervisor of that run: process ids are reused."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
    except psutil.Error:
        return False
    return "rlx.launch.supervisor" in command and run_id in command


def list_live_ranks(folder: Path, supervisor: int | None = None) -> Iterator[int]:
    """Process ids of a run's live ranks, and of their launcher if they have one.

    They are recognised by the run's folder in their command lines, which differs between homes.
    torchrun puts every rank in its own process group, so a torchrun that is killed leaves its ranks
    running.

    Args:
        supervisor: only the ranks of this supervisor; a later attempt on this machine has others.
    """
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or ()
        if "rlx.launch.rank" not in command or str(folder) not in command:
            continue
        if supervisor is not None:
            try:
                if process.environ().get("RLX_SUPERVISOR") != str(supervisor):
                    continue
            except psutil.Error:
                continue
        yield process.pid
