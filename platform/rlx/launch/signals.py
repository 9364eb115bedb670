"""Signals that request a stop of a run, and those that must not come between two steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

__all__ = ["SigtermListener", "delay_interrupts"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a user, a system or a terminal ends a command."""


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


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delays interrupts to the end of the block, so that a recorded run is also started.

    Signals reach the main thread; in another thread nothing has to be delayed.
    """
    if current_thread() is not main_thread():
        yield
        return
    put_off: list[int] = []

    def remember_signal(number: int, _: FrameType | None) -> None:
        put_off.append(number)

    before = {number: signal.signal(number, remember_signal) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in put_off:
        signal.raise_signal(late)
