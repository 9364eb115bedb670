"""Dashboards in processes of their own, as `rlx web` serves them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
from patience import find_free_port, stop_process, wait_until

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
def dashboard(registry: str) -> Iterator[Dashboard]:
    """Starts `rlx web` on a registry, and ends it. Nothing has been asked of it before."""
    port = find_free_port()
    # Other work may have pinned the number of threads; a dashboard has its own.
    command = [sys.executable, "-c", START, "web", "--no-token", "--port", str(port)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "RLX_REGISTRY": registry}
    )
    try:
        wait_until("rlx web to serve", lambda: _accepts_connections(process, port))
        yield Dashboard(port, psutil.Process(process.pid))
    finally:
        stop_process(process)


def _accepts_connections(process: "subprocess.Popen[str]", port: int) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"rlx web ended: {process.communicate()[1]}")
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False
