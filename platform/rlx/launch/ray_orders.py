"""What the driver of a run on a Ray cluster is to do: to go on, to stop, or to end at once."""

import os
import signal
from contextlib import suppress

import psutil

__all__ = ["NotWantedError", "Orders"]


class NotWantedError(Exception):
    """The ranks are not wanted any more, before all of them have started."""


class Orders:
    """Knows whether the ranks are to stop, and whether their supervisor is gone.

    Attributes:
        stop: the ranks should write a checkpoint and exit.
    """

    def __init__(self) -> None:
        self.stop = False
        self._supervisor: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._supervisor = psutil.Process(int(os.environ["RLX_SUPERVISOR"]))
        self.listen()

    def listen(self) -> None:
        """Takes SIGTERM for the order to stop."""
        signal.signal(signal.SIGTERM, self._handle_signal)

    def is_orphan(self) -> bool:
        """Whether the supervisor is gone."""
        with suppress(psutil.NoSuchProcess):
            if self._supervisor is not None and self._supervisor.is_running():
                return bool(self._supervisor.status() == psutil.STATUS_ZOMBIE)
        return True

    def require_start(self) -> None:
        """For whoever waits for ranks to start.

        Raises:
            NotWantedError: they are to stop, or their supervisor is gone.
        """
        if self.stop or self.is_orphan():
            raise NotWantedError

    def _handle_signal(self, *_: object) -> None:
        self.stop = True
