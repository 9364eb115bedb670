"""Stop and kill requests to a supervisor, by a signal or through the registry."""

import signal

__all__ = ["SigtermListener"]


class SigtermListener:
    """Listens for SIGTERM: the first one requests a stop, the second a kill.

    Attributes:
        stop: the ranks should write a checkpoint and exit.
        kill: the ranks should exit without a checkpoint.
    """

    def __init__(self) -> None:
        self.stop = False
        self.kill = False
        self._count = 0
        signal.signal(signal.SIGTERM, self._handle_signal)

    def _handle_signal(self, *_: object) -> None:
        self._count += 1  # counts signals only, not requests through the registry
        self.kill |= self._count > 1
        self.stop = True

    def apply_request(self, request: str | None) -> None:
        """Applies a request from the registry, which may come from another machine."""
        self.kill |= request == "kill"
        self.stop |= request is not None
