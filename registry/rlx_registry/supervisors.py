"""Whether the supervisor of a run is alive, as its own machine can tell.

A file in the run's folder describes the supervisor's process. On the same machine a dead supervisor
is noticed at once, and a paused one is not taken for a dead one. Other machines go by the
heartbeat.
"""

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

_NAME = "supervisor.json"


def record_supervisor(folder: Path, pid: int) -> None:
    """Describes the supervisor of a run in its folder; `pid` is a process of this machine. Without
    a description, as on a full disk or another system, only the heartbeat tells."""
    machine, started = _identify_machine(), _find_start(pid)
    if machine is None or started is None:
        return
    aside = folder / f".{_NAME}.{os.getpid()}"
    with suppress(OSError):
        found = {"boot": machine[0], "namespace": machine[1], "pid": pid, "started": started}
        aside.write_text(json.dumps(found))
        aside.replace(folder / _NAME)


def forget_supervisor(folder: Path) -> None:
    """Removes the description, before the run ends or gets another supervisor."""
    with suppress(OSError):  # a run must be able to end on a disk that may only be read
        (folder / _NAME).unlink(missing_ok=True)


def is_supervisor_alive(folder: str | None) -> bool | None:
    """Whether the supervisor of the run in this folder is alive; None if only a heartbeat tells."""
    if folder is None:
        return None
    path = Path(folder) / _NAME
    try:
        found = json.loads(path.read_text())
        machine, pid, started = (found["boot"], found["namespace"]), found["pid"], found["started"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if machine != _identify_machine():
        return None
    with suppress(OSError):  # a system may hide the processes of other users
        if os.getuid() not in (0, path.stat().st_uid):
            return None
    return bool(_find_start(pid) == started)


@cache
def _identify_machine() -> tuple[str, str] | None:
    """Returns the ids of this system's start, and of the namespace of process ids here: every
    container has its own."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, str(Path("/proc/self/ns/pid").readlink())
    return None


def _find_start(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since the boot, which no clock that is set
    changes; None if it has ended."""
    try:
        # The name, in parentheses, may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
