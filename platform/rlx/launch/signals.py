"""What a supervisor has been told to do: by a signal, or by a request in the registry."""

import signal

__all__ = ["SigtermListener"]


class SigtermListener:
    """Listens for SIGTERM: the first asks to stop, the second to stop at once.

    Attributes:
        stop: ranks shall write a checkpoint and end.
        kill: they shall end without one.
    """

    def __init__(self) -> None:
        self.stop = False
        self.kill = False
        self._heard = 0
        signal.signal(signal.SIGTERM, self._handle_signal)

    def _handle_signal(self, *_: object) -> None:
        self._heard += 1  # a request may have come through the registry as well: that is no second
        self.kill |= self._heard > 1
        self.stop = True

    def apply_request(self, request: str | None) -> None:
        """Takes over what somebody has left in the registry, maybe on another machine."""
        self.kill |= request == "kill"
        self.stop |= request is not None
