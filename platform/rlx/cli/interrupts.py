"""Interrupts of a command that come at a bad moment."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["delay_interrupts"]


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delays interrupts to the end of the block, so that a recorded run is also started."""
    put_off: list[int] = []

    def remember_signal(number: int, _: FrameType | None) -> None:
        put_off.append(number)

    before = {
        number: signal.signal(number, remember_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in put_off:
        signal.raise_signal(late)
