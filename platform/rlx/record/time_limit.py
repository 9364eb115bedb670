"""Limit the time of calls that cannot be interrupted, such as requests to a server that hangs."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["TimedCaller"]

T = TypeVar("T")


class TimedCaller:
    """Calls functions, each for a limited time, and together for a limited time.

    A timeout of a socket limits one read, so a server that sends a byte now and then holds a
    request for good. Here every call has a daemon thread. A call that takes too long is abandoned
    in its thread, which ends with its connection or its process. At most one call is abandoned:
    while it lasts, later calls wait for it and fail.

    Args:
        call_seconds: limit of each call.
        total_seconds: limit of all calls since `restart`; None sets no limit.
    """

    def __init__(self, call_seconds: float, total_seconds: float | None = None) -> None:
        self._call_seconds = call_seconds
        self._total_seconds = total_seconds
        self._abandoned: threading.Thread | None = None
        self.restart()

    def restart(self) -> None:
        """Begins the limit of all calls anew."""
        total = self._total_seconds
        self._until = None if total is None else time.monotonic() + total

    def call(self, function: Callable[[], T]) -> T:
        """Calls `function` and returns its value, or raises what it raises.

        Raises:
            TimeoutError: it has not returned in time.
        """
        seconds = self._call_seconds
        if self._until is not None:
            seconds = min(seconds, max(0.0, self._until - time.monotonic()))
        end = time.monotonic() + seconds
        if self._abandoned is not None:
            self._abandoned.join(seconds)
            if self._abandoned.is_alive():
                raise TimeoutError(
                    f"an earlier request is still open after another {seconds:.0f} s"
                )
            self._abandoned = None
        outcome: dict[str, Any] = {}
        thread = threading.Thread(target=_keep_outcome, args=(function, outcome), daemon=True)
        thread.start()
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            self._abandoned = thread
            raise TimeoutError(f"no complete answer in {seconds:.0f} s")
        if "error" in outcome:
            raise outcome["error"]
        value: T = outcome["value"]
        return value


def _keep_outcome(function: Callable[[], Any], outcome: dict[str, Any]) -> None:
    try:
        outcome["value"] = function()
    except BaseException as error:  # noqa: BLE001  (raised again by the caller)
        outcome["error"] = error
