"""Calls of functions that may compute for hours, in a process with a limit."""

import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LimitedResult:
    """What a call returned, or why there is no value; `is_raised` if the function raised."""

    value: Any = None
    fault: str | None = None
    is_raised: bool = False


def call_with_limit(function: Callable[[], Any], seconds: float) -> LimitedResult:
    """Calls a function with a limit on its processor time, also if it never returns to Python.

    `99**98**97` is one instruction of the interpreter: no signal handler and no thread can stop
    it. The value must be plain: it crosses a pipe.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            sent = pickle.dumps(_call(function))
            while sent:
                sent = sent[os.write(writing, sent) :]
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        sent = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGPROF:
        return LimitedResult(fault=f"took more than {seconds:g} s of processor time")
    if code or not sent:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return LimitedResult(fault=f"ended its process ({how})")
    result: LimitedResult = pickle.loads(sent)
    return result


def _call(function: Callable[[], Any]) -> LimitedResult:
    try:
        return LimitedResult(function())
    except (MemoryError, RecursionError) as error:
        return LimitedResult(fault=type(error).__name__)
    except Exception as error:  # noqa: BLE001  (the caller gets it as a fault)
        fault = f"{type(error).__name__}: {str(error)[:200]}"
        return LimitedResult(fault=fault, is_raised=True)
