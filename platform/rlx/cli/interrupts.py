"""Interrupts of a command that come at a bad moment."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer, main_thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

__all__ = ["deliver_ignored_interrupts", "hide_logged_interrupts"]

DELIVER_AFTER = 0.05
"""Seconds until an ignored interrupt comes again, outside of the code that cannot raise it."""


@contextmanager
def deliver_ignored_interrupts() -> Iterator[None]:
    """Delivers an interrupt again that Python ignored.

    Python ignores what is raised in `__del__` and in the callbacks of weak references, which each
    import has. The user's Ctrl-C would be lost.
    """
    before, waiting = sys.unraisablehook, list[Timer]()

    def deliver_again(ignored: "UnraisableHookArgs") -> None:
        main = main_thread().ident
        if ignored.exc_type is not KeyboardInterrupt or main is None:
            before(ignored)
            return
        waiting.append(Timer(DELIVER_AFTER, signal.pthread_kill, (main, signal.SIGINT)))
        waiting[-1].daemon = True
        waiting[-1].start()

    sys.unraisablehook = deliver_again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in waiting:
            timer.cancel()


@contextmanager
def hide_logged_interrupts() -> Iterator[None]:
    """Hides the traceback of an interrupt that a library logs before it raises it again.

    SQLAlchemy does so where an interrupt comes while it closes a connection. Only logging's last
    resort, which prints to stderr, is filtered: a log that somebody has configured is complete.
    """

    def is_no_interrupt(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt))

    handler = logging.lastResort
    if handler is None:
        yield
        return
    handler.addFilter(is_no_interrupt)
    try:
        yield
    finally:
        handler.removeFilter(is_no_interrupt)
