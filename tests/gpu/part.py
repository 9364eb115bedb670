"""One part of the check while it runs: its figures, its limit of time, and the commands in it."""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import parse_figure

from rlx.descendants import kill_descendants

TESTS = Path(__file__).parents[1]
LONGEST = 480.0
"""Seconds that one part may take, all its commands together."""
LONGEST_REHEARSAL = 1800.0
"""The same on a CPU, where nothing is lent and other work may be going on."""
KEPT = 4000
"""Characters of the output that are kept when a command fails."""
NOISE = re.compile(
    r"^(nanobind:| - leaked| - \.\.\. skipped|See https://nanobind).*\n?", re.MULTILINE
)
"""What Triton's library says when an interpreter ends."""

Result = dict[str, Any]


class PartFailedError(Exception):
    """A command of the part failed or took too long."""


class PartSkippedError(Exception):
    """Something that the part needs is not here."""


class Part:
    """What a part is given.

    Args:
        device: `cuda`, or `cpu` for a rehearsal.
        result: of the part; figures are written to it.
        write: called after each figure.
        longest: seconds.
    """

    def __init__(
        self, device: str, result: Result, write: Callable[[], None], longest: float
    ) -> None:
        self.device = device
        self._result = result
        self._write = write
        self._longest = longest
        self._deadline = time.monotonic() + longest

    def note(self, name: str, /, **figures: Any) -> None:
        """Keeps one figure."""
        self._result.setdefault("figures", {})[name] = figures
        self._write()

    def run_script(self, name: str, *arguments: str) -> str:
        """Runs a script of this folder; see `run`."""
        return self.run([sys.executable, "-m", f"gpu.{name}", *arguments])

    def run(self, command: list[str]) -> str:
        """Runs a command to its end, and keeps every figure that it prints.

        Returns:
            What else it printed to its standard output.

        Raises:
            PartFailedError: it failed, or the part's time was over; with the end of its output.
        """
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",
            "RLX_TEST_DEVICE": self.device,
            "PYTHONPATH": os.pathsep.join(paths),
            **({"HF_HUB_OFFLINE": "1"} if self.device == "cuda" else {}),
        }
        said, late = "", threading.Event()
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=variables,
            )
            timer = threading.Timer(self._deadline - time.monotonic(), _end_all, [late])
            timer.start()
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    said += self._take(line)
            code = process.wait()
            timer.cancel()
            timer.join()
            errors.seek(0)
            complaints = NOISE.sub("", errors.read().decode(errors="replace"))
        if late.is_set() or code:
            self._result["output"] = (said + complaints)[-KEPT:]
            lasted = f"no end after {self._longest:.0f} s"
            raise PartFailedError(lasted if late.is_set() else f"exit code {code}")
        return said

    def _take(self, line: str) -> str:
        """Keeps a figure; returns what is not one."""
        found = parse_figure(line)
        for name, figures in (found or {}).items():
            self.note(name, **figures)
        return "" if found else line


def _end_all(late: threading.Event) -> None:
    """Ends the command, what it started, and runs that it left to their supervisors."""
    late.set()
    kill_descendants()
