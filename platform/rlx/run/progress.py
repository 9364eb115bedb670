"""What a run is doing right now, for whoever follows it."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

__all__ = ["Progress", "ProgressFile", "read_progress"]

EVERY = 0.2
"""Seconds between two writes of the same stage."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of progress: `done` of `total` in a stage, a few figures, and the work in hand."""

    stage: str
    done: int
    total: int
    note: str = ""
    doing: str = ""


class ProgressFile:
    """Replaces one small file; readers see a whole line or the one before.

    Args:
        path: None where another rank tells.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._shown = Progress("starting", 0, 1)
        self._at = 0.0

    def show(self, progress: Progress) -> None:
        """Shows `progress`, unless the same stage was shown a moment ago."""
        now, before = time.monotonic(), self._shown
        finished = progress.done == progress.total
        if now - self._at < EVERY and before.stage == progress.stage and not finished:
            return
        self._at, self._shown = now, progress
        self._write()

    def show_activity(self, what: str) -> None:
        """Shows what is being done within the stage, at once."""
        self._shown = replace(self._shown, doing=what)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        aside = self._path.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(self._shown)))
        aside.replace(self._path)


def read_progress(path: Path) -> Progress | None:
    """What the run last said; None before it has said anything."""
    try:
        return Progress(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
