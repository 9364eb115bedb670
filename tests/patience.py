"""Patience: how tests wait for something, and how they end what they started.

A busy machine is no failure, so no test measures time: a wait has a generous limit, and says what
it waited for when that has passed.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rlx.launch.processes import find_free_port

__all__ = [
    "LIMIT",
    "ForwardClock",
    "find_free_port",
    "find_processes",
    "signal_processes",
    "stop_process",
    "wait_until",
]

LIMIT = 600.0
"""Seconds of one wait; a test as a whole has 1800, and guards against a hang, no more."""
GRACE = 30.0
"""Seconds in which a process may end by itself."""
FORWARD = Path(__file__).parent / "system" / "clock"
"""Has a Python that finds it on its path read a `ForwardClock`."""

Found = TypeVar("Found")


class ForwardClock:
    """A clock that goes as usual, and that a test sets forward: what rlx gives up after so many
    seconds, it gives up when the test says so.

    Args:
        folder: for a file of its own.

    Attributes:
        seconds: by how much it is ahead.
    """

    def __init__(self, folder: Path) -> None:
        self.seconds, self._file = 0.0, folder / "forward"
        self.set_forward(0.0)

    def set_forward(self, seconds: float) -> None:
        """Lets so much time pass, for all processes that read it."""
        self.seconds += seconds
        new = self._file.with_suffix(".new")
        new.write_text(str(self.seconds))
        new.replace(self._file)  # who reads it never finds half of it

    def hand_to(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What to change in the environment of processes that are to read it."""
        path = os.pathsep.join([str(FORWARD), environment["PYTHONPATH"]])
        return {"RLX_TEST_FORWARD": str(self._file), "PYTHONPATH": path}


def wait_until(what: str, check: Callable[[], Found], limit: float = LIMIT) -> Found:
    """Returns the first value of `check` that counts as true.

    Args:
        what: what is waited for, as in "waited 600 s for the run to end".
        check: called about ten times a second, and less often if it takes long, for what it starts
            would keep the machine from what is waited for. What it raises ends the wait.

    Raises:
        AssertionError: there was none in time; the message has the last value.
    """
    now = time.monotonic()
    end = now + limit
    while not (found := check()):
        began, now = now, time.monotonic()
        if now > end:
            raise AssertionError(f"waited {limit:g} s for {what}; last seen: {found!r}")
        time.sleep(max(0.1, 3 * (now - began)))
        now = time.monotonic()
    return found


def stop_process(process: "subprocess.Popen[Any]", number: int = signal.SIGTERM) -> None:
    """Ends a process: by a signal, and by SIGKILL if it does not end soon.

    If it leads a process group, the whole group is signalled. Its pipes are read to their end or
    closed, so that it cannot hang on a full one.
    """
    for signalled in (number, signal.SIGKILL):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signalled)
            else:
                process.send_signal(signalled)
        with suppress(subprocess.TimeoutExpired, ValueError):  # a pipe that was closed before
            process.communicate(timeout=GRACE)
        if process.poll() is not None:
            break
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    assert process.poll() is not None, f"process {process.pid} outlives SIGKILL"


def find_processes(home: object) -> list[int]:
    """Every process that was started for a home, whoever its parent is now."""
    mark, found = f"RLX_HOME={home}".encode(), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended, or is not ours
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def signal_processes(pids: Iterable[int], number: int) -> None:
    """Sends a signal to those of the processes that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
