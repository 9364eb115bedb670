"""Dashboards in processes of their own, as `rlx web` serves them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

__all__ = ["Dashboard", "dashboard"]

START = "import sys; from rlx.cli import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard that serves."""

    port: int
    process: psutil.Process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu(self) -> float:
        """Seconds that it has spent so far, of every thread."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def dashboard(registry: str, patience: float = 60) -> Iterator[Dashboard]:
    """Starts `rlx web` on a registry, and ends it. Nothing has been asked of it before."""
    port = _free_port()
    # Other work may have pinned the number of threads; a dashboard has its own.
    command = [sys.executable, "-c", START, "web", "--port", str(port), "--registry", registry]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        _wait(process, port, patience)
        yield Dashboard(port, psutil.Process(process.pid))
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
        process.kill()


def _wait(process: "subprocess.Popen[str]", port: int, patience: float) -> None:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(f"rlx web ended: {process.communicate()[1]}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError(f"rlx web does not serve after {patience:g} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
