"""Calls a function in a child process that the kernel ends when its time is up."""

import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["BoundedResult", "call_with_limit"]


@dataclass(frozen=True, slots=True)
class BoundedResult:
    """What became of a call.

    Attributes:
        value: what the function returned; None after a fault.
        fault: why there is no value, in words; None if there is one.
    """

    value: Any = None
    fault: str | None = None


def call_with_limit(function: Callable[[], Any], seconds: float) -> BoundedResult:
    """Calls a function with a limit on its processor time, also if it never returns to Python.

    `99**98**97` is one instruction of the interpreter: no signal handler and no thread can stop
    it. The value must be plain: it crosses a pipe.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _run_in_child(function, seconds, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        sent = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGPROF:
        return BoundedResult(fault=f"took more than {seconds:g} s of processor time")
    if code or not sent:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return BoundedResult(fault=f"ended its process ({how})")
    result: BoundedResult = pickle.loads(sent)
    return result


def _run_in_child(function: Callable[[], Any], seconds: float, writing: int) -> None:
    """Runs the function, sends its result, and ends this process without any clean-up."""
    code = 1
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            result = BoundedResult(function())
        except (MemoryError, RecursionError) as error:
            result = BoundedResult(fault=type(error).__name__)
        except Exception as error:  # noqa: BLE001  (the caller gets it as a fault)
            result = BoundedResult(fault=f"{type(error).__name__}: {str(error)[:200]}")
        sent = pickle.dumps(result)
        while sent:
            sent = sent[os.write(writing, sent) :]
        code = 0
    finally:
        os._exit(code)
