"""CPU seconds of a rank, by the parts of its work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Part = Literal["sample", "score", "learn", "evaluate"]


class CpuAccount:
    """Adds up the CPU seconds of a rank by part of its work; what is in no part is the rest.

    Args:
        read: returns CPU seconds so far, of this process and of those that work for it.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._seconds = dict.fromkeys(get_args(Part), 0.0)
        self._since, self._measured = read(), 0.0
        self._is_measuring = False

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Counts what is used within the block as `part`; a block inside another is part of it."""
        if self._is_measuring:
            yield
            return
        self._is_measuring, began = True, self._read()
        try:
            yield
        finally:
            self._is_measuring, used = False, self._read() - began
            self._seconds[part] += used
            self._measured += used

    def take(self, *parts: Part) -> dict[str, float]:
        """Metrics of parts, since each was taken last."""
        taken = {f"perf/cpu_{part}_s": self._seconds[part] for part in parts}
        self._seconds |= dict.fromkeys(parts, 0.0)
        return taken

    def take_rest(self) -> dict[str, float]:
        """The metric of what was in no part since the last call."""
        now = self._read()
        rest = now - self._since - self._measured
        self._since, self._measured = now, 0.0
        return {"perf/cpu_rest_s": rest}
