"""The lines that a run's processes print to its log: each begins with the local date and time."""

import io
import sys
from typing import TextIO

from rlx.text import format_timestamp

__all__ = ["TIMESTAMP", "stamp_output"]

TIMESTAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "
"""Pattern of what `stamp_output` puts before a line."""


def stamp_output() -> None:
    """Has this process print the time before each line of stdout and stderr.

    What other programs and libraries in C write to the same file has none.
    """
    sys.stdout, sys.stderr = _StampedStream(sys.stdout), _StampedStream(sys.stderr)


class _StampedStream(io.TextIOWrapper):
    """Writes whole lines, so that those of several processes do not mix."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(
            stream.buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        self._begins = True

    def write(self, text: str) -> int:
        """Writes a text, and the time before each line that begins in it."""
        stamped = []
        for line in io.StringIO(text, newline="\n"):
            stamped += [f"{format_timestamp()}  {line}" if self._begins else line]
            self._begins = line.endswith("\n")
        super().write("".join(stamped))
        return len(text)
