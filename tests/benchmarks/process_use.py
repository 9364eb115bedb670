"""CPU time and resident memory of processes."""

import re
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["forget_peak", "read_kilobytes", "sum_tree_seconds"]


def sum_tree_seconds() -> float:
    """CPU seconds of all processes below this one so far, of those that have ended too."""
    me = psutil.Process()
    own = me.cpu_times()
    seconds = own.children_user + own.children_system
    for process in me.children(recursive=True):
        with suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:4])
    return float(seconds)


def read_kilobytes(field: str) -> int:
    """A size of this process by its name in /proc: VmRSS now, VmHWM at its highest."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def forget_peak() -> None:
    """Lets VmHWM begin again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
