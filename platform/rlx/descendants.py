"""The processes that this one started, those that they started, and so on.

When a process ends, its children move to another parent: the nearest ancestor that adopts orphans,
or the system's first process. A process that adopts orphans can therefore find and end everything
below it, also what has left its process group or session.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROUNDS = 50
"""A killed process may have started another one just before; a process that waits for a device
ends later, and is not waited for."""
_PAUSE, _LONGEST_PAUSE = 0.02, 0.25
"""Seconds between two looks at what is left; each look reads the state of all processes."""


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose parents end.

    psutil is imported here: a signal handler may interrupt `kill_descendants`, and a half-done
    import would fail or wait for itself.
    """
    import psutil  # noqa: F401

    _set_process_option(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    _set_process_option(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def kill_descendants(patience: float = 0.0, spare: Collection[int] = ()) -> None:
    """Kills all descendants of this process, which may first end by themselves for `patience`
    seconds, and collects its children; those to `spare` are left alone, with their descendants."""
    if not _has_children():
        return
    import psutil  # slow to import, and seldom needed

    me, waited, pause = psutil.Process(), 0.0, _PAUSE

    def list_others() -> list[psutil.Process]:
        spared = {p.pid for pid in spare for p in list_descendants(pid)}.union(spare)
        return [p for p in me.children(recursive=True) if p.pid not in spared]

    while waited < patience and (found := list_others()):
        psutil.wait_procs(found, timeout=pause)
        waited += pause
        pause = min(2 * pause, _LONGEST_PAUSE)
    for _ in range(_ROUNDS):
        found = list_others()
        if not found:
            return
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=_PAUSE)


def list_descendants(pid: int) -> list[psutil.Process]:
    import psutil

    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        found = psutil.Process(pid).children(recursive=True)
    return found


def kill_processes(processes: Iterable[psutil.Process]) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def wait_for_end(pid: int, patience: float) -> None:
    """Waits until a child has ended, at most so many seconds; its exit code can still be read."""
    waited = 0.0
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while waited < patience and os.waitid(os.P_PID, pid, ended) is None:
        time.sleep(_PAUSE)
        waited += _PAUSE


def reap_orphans(own: Collection[int] = ()) -> None:
    """Collects adopted processes that have ended; `own` are children left to their starter."""
    with suppress(ChildProcessError):  # there are no children
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, 0)


def _has_children() -> bool:
    """Whether this process has children, including ended ones that were not collected."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _set_process_option(option: int, value: ctypes.c_ulong) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
