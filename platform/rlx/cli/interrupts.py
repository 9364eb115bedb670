"""Interrupts (Ctrl-C) of a command that come where Python, a library or Pydantic swallows them."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

DELIVER_AFTER = 0.05
"""Seconds until an ignored interrupt comes again, outside of the code that cannot raise it."""


@contextmanager
def watch_interrupts() -> Iterator[list[int]]:
    """Yields a list that gets an entry per interrupt, and loses none during the block.

    Compiled code such as Pydantic's may turn an interrupt into another error: the list says so.
    What is raised in `__del__` and in callbacks of weak references, which each import has, Python
    ignores: it is delivered again. SQLAlchemy logs the traceback of one that comes while it closes
    a connection: it is left out of logging's last resort.
    """
    came, timers, hook = list[int](), list[Timer](), sys.unraisablehook

    def record(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    def deliver_again(ignored: "UnraisableHookArgs") -> None:
        if ignored.exc_type is not KeyboardInterrupt:
            hook(ignored)
            return
        main = main_thread().ident
        timers.append(Timer(DELIVER_AFTER, signal.pthread_kill, (main, signal.SIGINT)))
        timers[-1].daemon = True
        timers[-1].start()

    def is_no_interrupt(entry: logging.LogRecord) -> bool:
        return not (entry.exc_info and isinstance(entry.exc_info[1], KeyboardInterrupt))

    handler, before = logging.lastResort, signal.getsignal(signal.SIGINT)
    is_ours = before is signal.default_int_handler and current_thread() is main_thread()
    sys.unraisablehook = deliver_again
    if is_ours:
        signal.signal(signal.SIGINT, record)
    if handler is not None:
        handler.addFilter(is_no_interrupt)
    try:
        yield came
    finally:
        if handler is not None:
            handler.removeFilter(is_no_interrupt)
        if is_ours:
            signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
        for timer in timers:
            timer.cancel()
