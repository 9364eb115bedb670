"""What a run is doing right now, for whoever follows it."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Progress", "ProgressFile", "read_progress"]

EVERY = 0.2
"""Seconds between two writes of the same stage."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of progress: `done` of `total` in a stage, and a few figures."""

    stage: str
    done: int
    total: int
    note: str = ""


class ProgressFile:
    """Replaces one small file; readers see a whole line or the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = (0.0, "")

    def show(self, progress: Progress) -> None:
        """Shows `progress`, unless the same stage was shown a moment ago."""
        now = time.monotonic()
        finished = progress.done == progress.total
        if now - self._last[0] < EVERY and self._last[1] == progress.stage and not finished:
            return
        self._last = (now, progress.stage)
        aside = self._path.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(progress)))
        aside.replace(self._path)


def read_progress(path: Path) -> Progress | None:
    """What the run last said; None before it has said anything."""
    try:
        return Progress(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
