"""A clock that tests can replace, and time that does not count while this process is paused."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Tells the time, of which only differences mean something, and lets it pass; in seconds."""

    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep


CLOCK = Clock()
"""The real one."""


class Stopwatch:
    """Adds up the intervals between looks, each of them up to a longest one.

    A pause of this process (SIGSTOP, a suspended machine, job or container) and a clock that jumps
    therefore add one interval at most. Slow looks make it run slow, never fast.

    Args:
        longest: the most that one interval adds, in seconds.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._before = clock()
        self.seconds = 0.0

    def look(self) -> float:
        """Adds the time since the last look; returns the sum."""
        self.seconds += self.skip()
        return self.seconds

    def skip(self) -> float:
        """Leaves the time since the last look out; returns what would have been added."""
        before, self._before = self._before, self._clock()
        return min(max(self._before - before, 0.0), self._longest)

    def restart(self) -> None:
        """Starts again from 0."""
        self.skip()
        self.seconds = 0.0
