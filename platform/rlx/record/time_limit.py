"""Limit the time of calls that cannot be interrupted, such as requests to a server that hangs."""

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rlx.stopwatch import Stopwatch

__all__ = ["TimedCaller"]

T = TypeVar("T")

_LOOK = 1.0
"""Seconds between looks at a call."""


class TimedCaller:
    """Calls functions, each for a limited time, and together for a limited time.

    A timeout of a socket limits one read, so a server that sends a byte now and then holds a
    request for good. Here every call has a daemon thread. A call that takes too long is abandoned
    in its thread, which ends with its connection or its process. At most one call is abandoned:
    while it lasts, later calls wait for it and fail. A pause of this process does not count.

    Args:
        call_seconds: limit of each call.
        total_seconds: limit of all calls since `restart`; None sets no limit.
    """

    def __init__(self, call_seconds: float, total_seconds: float | None = None) -> None:
        self._call_seconds = call_seconds
        self._total_seconds = math.inf if total_seconds is None else total_seconds
        self._abandoned: threading.Thread | None = None
        self.restart()

    def restart(self) -> None:
        """Begins the limit of all calls anew."""
        self._left = self._total_seconds

    def call(self, function: Callable[[], T]) -> T:
        """Calls `function` and returns its value, or raises what it raises.

        Raises:
            TimeoutError: it has not returned in time.
        """
        seconds = min(self._call_seconds, self._left)
        if self._abandoned is not None:
            if not self._has_ended(self._abandoned, seconds):
                raise TimeoutError(
                    f"an earlier request is still open after another {seconds:.0f} s"
                )
            self._abandoned = None
        outcome: dict[str, Any] = {}
        thread = threading.Thread(target=_keep_outcome, args=(function, outcome), daemon=True)
        thread.start()
        if not self._has_ended(thread, seconds):
            self._abandoned = thread
            raise TimeoutError(f"no complete answer in {seconds:.0f} s")
        if "error" in outcome:
            raise outcome["error"]
        value: T = outcome["value"]
        return value

    def _has_ended(self, thread: threading.Thread, seconds: float) -> bool:
        """Waits for the end of a thread; returns whether it came in time."""
        stopwatch = Stopwatch(longest=_LOOK)
        while thread.is_alive() and stopwatch.look() < seconds:
            thread.join(min(_LOOK, seconds - stopwatch.seconds))
        self._left -= min(self._left, stopwatch.look())
        return not thread.is_alive()


def _keep_outcome(function: Callable[[], Any], outcome: dict[str, Any]) -> None:
    try:
        outcome["value"] = function()
    except BaseException as error:  # noqa: BLE001  (raised again by the caller)
        outcome["error"] = error
