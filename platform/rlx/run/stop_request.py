"""A stop request that training handles between two steps, when its state is consistent."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["RunStopped", "StopRequest"]


class RunStopped(Exception):
    """The run was stopped, after writing a checkpoint to resume from."""


class StopRequest:
    """Listens for SIGTERM.

    Outside `defer_exit` there is nothing to save, so SIGTERM ends the process at once.
    """

    def __init__(self) -> None:
        self._honoured = False
        self.requested = False
        signal.signal(signal.SIGTERM, self._handle_signal)

    def _handle_signal(self, *_: object) -> None:
        self.requested = True
        if not self._honoured:
            os._exit(128 + signal.SIGTERM)

    @contextmanager
    def defer_exit(self) -> Iterator[None]:
        """Defers the exit: within this context, training checks `requested` after every step."""
        self._honoured = True
        try:
            yield
        finally:
            self._honoured = False
