"""Dashboards in processes of their own, as `rlx web` serves them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from patience import find_free_port, stop_process, wait_until

__all__ = ["dashboard"]

START = "import sys; from rlx.cli import main; sys.exit(main())"


@contextmanager
def dashboard(registry: str) -> Iterator[str]:
    """Starts `rlx web` on a registry, yields its address, and ends it."""
    port = find_free_port()
    # Other work may have pinned the number of threads; a dashboard has its own.
    command = [sys.executable, "-c", START, "web", "--no-token", "--port", str(port)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "RLX_REGISTRY": registry}
    )
    try:
        wait_until("rlx web to serve", lambda: _accepts_connections(process, port))
        yield f"http://127.0.0.1:{port}"
    finally:
        stop_process(process)


def _accepts_connections(process: "subprocess.Popen[str]", port: int) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"rlx web ended: {process.communicate()[1]}")
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False
