"""CPU time of tests: `pytest --cpu-durations=20` prints what each room, file and test costs.

Wall time says little on a machine that does other work, so the seconds are those of the processor:
of the process that runs a test, and of the processes that it started and waited for.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(eq=False, slots=True)
class CpuDurations:
    """A plugin of pytest that attributes CPU time to the phases of tests, also of xdist's workers.

    Attributes:
        longest: how many files and phases of tests to list.
    """

    longest: int
    _last: float = 0.0
    _phases: Counter[tuple[str, str]] = field(default_factory=Counter)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Counts what it costs to import the tests."""
        self._last = _measure_cpu()
        if is_worker(session.config):
            session.config.workeroutput["collection"] = self._last  # type: ignore[attr-defined]
        else:
            self._phases["", "collection"] += self._last

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Adds what a worker spent on imports."""
        self._phases["", "collection"] += getattr(node, "workeroutput", {}).get("collection", 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Writes into a report what its phase cost, with the fixtures that it was first to need."""
        report: Any = yield
        now = _measure_cpu()
        report.cpu_seconds, self._last = now - self._last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Adds what a phase cost."""
        self._phases[report.nodeid, report.when] += report.cpu_seconds

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the tables."""
        write = terminalreporter.write_line
        files: Counter[str] = Counter()
        rooms: Counter[str] = Counter()
        for (test, _), seconds in self._phases.items():
            file = test.partition("::")[0]
            files[file] += seconds
            rooms[Path(file).parent.as_posix()] += seconds
        terminalreporter.section("CPU seconds by room")
        for room, seconds in rooms.most_common():
            write(f"{seconds:8.1f} {room if room != '.' else '(collection)'}")
        write(f"{rooms.total():8.1f} in all")
        terminalreporter.section("CPU seconds by file")
        for file, seconds in files.most_common(self.longest):
            write(f"{seconds:8.1f} {file or '(collection)'}")
        terminalreporter.section(f"{self.longest} phases with the most CPU seconds")
        for (test, phase), seconds in self._phases.most_common(self.longest):
            write(f"{seconds:8.1f} {phase:10} {test or '(all)'}")


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another."""
    return hasattr(config, "workeroutput")


def _measure_cpu() -> float:
    """Seconds of this process so far, and of all that it has waited for."""
    return sum(os.times()[:4])
