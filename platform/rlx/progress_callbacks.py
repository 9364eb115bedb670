"""Callbacks by which long-running functions report their progress and print sentences.

The command line shows a progress bar and prints the sentences; in Python they are logged.
"""

import logging
from contextlib import suppress
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
    """Prints a line to the run's log.

    Args:
        out: the log, where stdout is something else.
    """
    with suppress(OSError):  # the log's disk may be full
        print(line, file=out, flush=True)
