"""Progress: callbacks of long-running functions, and how far a run is, in a file that others read.

The command line shows a progress bar and prints the sentences; in Python they are logged.
"""

import json
import logging
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, TextIO

_LOG = logging.getLogger("rlx")


class ShowProgress(Protocol):
    """Shows how far a function is."""

    def __call__(self, done: int, total: int | None = None, stage: str = "") -> None:
        """Shows `done` of `total`; leaves total and stage as they were if they are not given."""


class Report(Protocol):
    """Passes a sentence on."""

    def __call__(self, text: str, *, err: bool = False) -> None:
        """Passes on `text`; `err` is for warnings and for what is not a result."""


def ignore_progress(done: int, total: int | None = None, stage: str = "") -> None:
    """Shows nothing."""


def log_report(text: str, *, err: bool = False) -> None:
    """Logs a sentence with the logger `rlx`: as information, or as a warning."""
    _LOG.log(logging.WARNING if err else logging.INFO, text)


def print_to_log(line: str, *, out: TextIO | None = None) -> None:
    """Prints a line to the run's log: stdout, or `out` where stdout is something else."""
    with suppress(OSError):  # the log's disk may be full
        print(line, file=out, flush=True)


WRITE_INTERVAL = 0.2
"""Minimum number of seconds between two writes within a stage."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of progress: `done` of `total` in a stage, a few metrics, and the activity."""

    stage: str
    done: int
    total: int
    note: str = ""
    doing: str = ""


class ProgressFile:
    """Writes progress to a file atomically; nowhere without a path, where another rank does."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._progress = Progress("starting", 0, 1)
        self._at = 0.0

    def show(self, progress: Progress) -> None:
        """Writes `progress`; within an unfinished stage at most every `WRITE_INTERVAL` seconds."""
        now, before = time.monotonic(), self._progress
        finished = progress.done == progress.total
        if now - self._at < WRITE_INTERVAL and before.stage == progress.stage and not finished:
            return
        self._at, self._progress = now, progress
        self._write()

    def show_activity(self, what: str) -> None:
        """Writes the current activity within the stage, at once."""
        self._progress = replace(self._progress, doing=what)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        aside = self._path.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(self._progress)))
        aside.replace(self._path)


def read_progress(path: Path) -> Progress | None:
    """Reads the latest progress of a run; None if it has not written any."""
    try:
        return Progress(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
