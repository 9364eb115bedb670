"""The processes of a run, found by what their command lines say."""

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from rlx.home import RunFolder
from rlx_registry import RunRecord

__all__ = ["is_abandoned", "is_supervisor", "list_live_ranks", "on_slurm", "this_machine"]


def this_machine() -> str:
    """The name under which this machine's processes and devices stand in the registry."""
    return socket.gethostname()


def is_abandoned(run: RunRecord) -> bool:
    """Whether a run that counts as alive has lost its supervisor.

    On another machine nobody here can see that: there silence tells, see `effective_status`. Of a
    job, Slurm does, and may start it again.
    """
    if run.effective_status == "lost":
        return True
    if run.status not in ("submitted", "running") or run.pid is None or on_slurm(run):
        return False
    return run.host in (None, this_machine()) and not is_supervisor(run.pid, run.id)


def on_slurm(run: RunRecord) -> bool:
    """Whether a run is a job of Slurm."""
    return run.directory is not None and RunFolder(Path(run.directory)).job.exists()


def is_supervisor(pid: int, run_id: str) -> bool:
    """Whether `pid` is alive and still the supervisor of that run: process ids are used again."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
    except psutil.Error:
        return False
    return "rlx.launch.supervisor" in command and run_id in command


def list_live_ranks(folder: Path, supervisor: int | None = None) -> Iterator[int]:
    """Live ranks of a run, and their launcher if they have one.

    Their command lines name the run's folder, and other homes have other ones.

    torchrun puts every rank in a process group of its own, so one that is killed leaves them.

    Args:
        supervisor: whose ranks alone are meant; a later attempt on this machine has others.
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
