"""Command line of rlx: the `rlx` commands and their exit codes.

Results go to stdout, everything else to stderr. Exit codes are those of `rlx.errors`; 2 also means
wrong usage, 130 an interrupt. A traceback is printed only with RLX_DEBUG=1; that of an unexpected
error is always saved in a file.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING

import rlx

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

__all__ = ["main"]

COLLECT_AFTER = 50_000
"""Objects between two searches for garbage. Imports make many, and hardly any becomes garbage."""
DELIVER_AFTER = 0.05
"""Seconds until an ignored interrupt comes again, outside of the code that cannot raise it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, by default that of the process, and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    gc.set_threshold(COLLECT_AFTER)
    for name in ("stdout", "stderr"):  # a process may be started without them (`>&-`)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    if arguments == ["--version"]:
        print(f"rlx {rlx.__version__}")
        return 0
    try:
        with _watch_interrupts() as interrupts:
            from rlx.cli.verb_group import (
                rlx_command,
                run_guarded,  # after --version: importing click is slow
            )

            return run_guarded(rlx_command, arguments, interrupts)
    except KeyboardInterrupt:  # during an import, or while an error is reported
        print("interrupted", file=sys.stderr)
        return 130


@contextmanager
def _watch_interrupts() -> Iterator[list[int]]:
    """Yields a list that gets an entry per interrupt (Ctrl-C), and loses none during the block.

    Compiled code such as Pydantic's may turn an interrupt into another error: the list says so.
    Python ignores what is raised in `__del__` and in callbacks of weak references, which each
    import has: it is delivered again. SQLAlchemy logs the traceback of one that comes while it
    closes a connection: it is left out of logging's last resort.
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
