"""CPU time of tests: `pytest --cpu-durations=20` prints what each room, file and test costs.

Wall time says little on a machine that does other work, so the seconds are those of the processor:
of pytest itself and of all that its tests start, also of supervisors, which leave the group and the
session of their starter. pytest therefore runs below a process that adopts orphans: what ended is
counted by the kernel in its parent, up to that process, and what lives is read from /proc.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlx.descendants import adopt_orphans

__all__ = ["CpuDurations", "run_below_adopter"]

TESTS = Path(__file__).parent


def run_below_adopter() -> None:
    """Goes on in a child; this process collects whatever ends below it, and ends with the child."""
    adopt_orphans()
    child = os.fork()
    if child == 0:
        return
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


@dataclass(eq=False, slots=True)
class CpuDurations:
    """A plugin of pytest that attributes CPU time to the phases of tests.

    What runs in the background is attributed to the test that runs meanwhile.

    Attributes:
        longest: how many phases of tests to list.
    """

    longest: int
    _adopter: int = field(default_factory=os.getppid)
    _last: float = 0.0
    _phases: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._last = self._measure_tree()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Counts what the set-up of a test costs, with the fixtures that it is first to ask for."""
        return (yield from self._count(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Counts what a test itself costs."""
        return (yield from self._count(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Counts what it costs to take a test's fixtures down."""
        return (yield from self._count(item, "teardown"))

    def pytest_collection_finish(self) -> None:
        """Counts what it costs to import the tests."""
        self._add("", "collection")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the tables."""
        write = terminalreporter.write_line
        files: Counter[str] = Counter()
        rooms: Counter[str] = Counter()
        for (test, _), seconds in self._phases.items():
            file = test.partition("::")[0]
            files[file] += seconds
            rooms[_name_room(file)] += seconds
        terminalreporter.section("CPU seconds by room")
        for room, seconds in rooms.most_common():
            write(f"{seconds:8.1f} {room or '(collection)'}")
        write(f"{rooms.total():8.1f} in all")
        terminalreporter.section("CPU seconds by file")
        for file, seconds in files.most_common(self.longest):
            write(f"{seconds:8.1f} {file or '(collection)'}")
        terminalreporter.section(f"{self.longest} phases with the most CPU seconds")
        for (test, phase), seconds in self._phases.most_common(self.longest):
            write(f"{seconds:8.1f} {phase:10} {test or '(all)'}")

    def _count(self, item: pytest.Item, phase: str) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._add(item.nodeid, phase)

    def _add(self, test: str, phase: str) -> None:
        now = self._measure_tree()
        self._phases[test, phase] += now - self._last
        self._last = now

    def _measure_tree(self) -> float:
        """CPU seconds of this process's tree so far, of whatever has ended and whatever lives."""
        seconds = 0.0
        for pid in [self._adopter, *_list_descendants(self._adopter)]:
            with suppress(psutil.Error):
                seconds += sum(psutil.Process(pid).cpu_times()[:4])
        return seconds


def _list_descendants(pid: int) -> Iterator[int]:
    """What lives below a process. The kernel lists children; psutil would read every process, which
    costs more than most tests do."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _list_descendants(child)


def _name_room(file: str) -> str:
    parts = Path(file).parts
    return "/".join(parts[:-1])
