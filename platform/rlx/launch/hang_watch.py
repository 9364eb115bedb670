"""Tells a hang from a pause: how long ranks have run without progress."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from rlx.launch.processes import is_rank
from rlx.stopwatch import Stopwatch

__all__ = ["HangWatch"]

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_CGROUPS = Path("/sys/fs/cgroup")


class HangWatch:
    """Measures how long ranks have run without progress.

    The time in which this process was paused itself does not count (see `Stopwatch`), and neither
    does that in which a rank on this machine is stopped.

    Args:
        progress: the file that the ranks replace with every progress.
        mark: an argument on the command lines of the ranks.
        stopwatch: measures the time between looks.

    Attributes:
        paused: whether a rank was stopped at the last look.
    """

    def __init__(self, progress: Path, mark: str, stopwatch: Stopwatch) -> None:
        self._progress, self._mark, self._stopwatch = progress, mark, stopwatch
        self._seen = self._identify_progress()
        self.paused = False

    def look(self, started: Iterable[int]) -> float:
        """Returns the seconds that the ranks have run since their last progress.

        Args:
            started: processes that are ranks, or have started the ranks.
        """
        before, self._seen = self._seen, self._identify_progress()
        self.paused = any(map(_is_stopped, self._list_ranks(started)))
        if self._seen != before:
            self._stopwatch.restart()
        elif self.paused:
            self._stopwatch.skip()
        else:
            self._stopwatch.look()
        return self._stopwatch.seconds

    def _identify_progress(self) -> tuple[int, int] | None:
        """What changes whenever the file is replaced; no time is compared with the clock."""
        try:
            stat = self._progress.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def _list_ranks(self, started: Iterable[int]) -> Iterator[psutil.Process]:
        for pid in started:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    with suppress(psutil.Error):
                        if is_rank(each, self._mark):
                            yield each


def _is_stopped(process: psutil.Process) -> bool:
    """Whether a process is stopped by a signal or a debugger, or its control group is frozen."""
    try:
        if process.status() in _STOPPED:
            return True
        groups = Path(f"/proc/{process.pid}/cgroup").read_text()
    except (psutil.Error, OSError):
        return False
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        here = path.lstrip("/")
        files: tuple[Path, ...] = ()
        if "freezer" in controllers.split(","):
            files = (_CGROUPS / "freezer" / here / "freezer.state",)
        elif not controllers:  # version 2, alone or beside version 1
            files = tuple(_CGROUPS / top / here / "cgroup.events" for top in ("", "unified"))
        if any(map(_says_frozen, files)):
            return True
    return False


def _says_frozen(file: Path) -> bool:
    """Whether a state file of a control group can be read and says that the group is frozen."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return False
    return not {"frozen 1", "FROZEN", "FREEZING"}.isdisjoint(lines)
