"""A request to stop that training honours between two steps, when all is in order."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["RunStopped", "StopRequest"]


class RunStopped(Exception):
    """The run has been stopped, and what it needs to go on is written down."""


class StopRequest:
    """Listens for SIGTERM.

    Where there is nothing yet to be written down, the process ends at once.
    """

    def __init__(self) -> None:
        self._honoured = False
        self.asked = False
        signal.signal(signal.SIGTERM, self._handle_signal)

    def _handle_signal(self, *_: object) -> None:
        self.asked = True
        if not self._honoured:
            os._exit(128 + signal.SIGTERM)

    @contextmanager
    def defer_exit(self) -> Iterator[None]:
        """While this lasts, whoever trains looks at `asked` after every step."""
        self._honoured = True
        try:
            yield
        finally:
            self._honoured = False
