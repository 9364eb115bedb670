"""The processes of a run, found by what their command lines say."""

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["is_supervisor", "live_ranks"]


def is_supervisor(pid: int, run_id: str) -> bool:
    """Whether `pid` is alive and still the supervisor of that run: process ids are used again."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
    except psutil.Error:
        return False
    return "rlx.run.supervise" in command and run_id in command


def live_ranks(folder: Path) -> Iterator[int]:
    """Live ranks of a run: their command lines name its folder, and other homes have other ones.

    torchrun puts every rank in a process group of its own, so one that is killed leaves them.
    """
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or ()
        if "rlx.run.rank" in command and str(folder) in command:
            yield process.pid
