"""Verbs that serve, in processes of their own."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from patience import find_free_port, stop_process, wait_until

START = (sys.executable, "-c", "import sys; from rlx.cli import main; sys.exit(main())")


@contextmanager
def serve(
    *arguments: Any, environment: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Starts a verb, yields its process and its port once it listens, and ends it."""
    port = find_free_port()
    command = [*START, *map(str, arguments), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd)
    try:
        wait_until("rlx to serve", lambda: _accepts_connections(process, port))
        yield process, port
    finally:
        stop_process(process)


@contextmanager
def dashboard(registry: str) -> Iterator[str]:
    """Starts `rlx web` on a registry, yields its address, and ends it."""
    # Other work may have pinned the number of threads; a dashboard has its own.
    environment = {**os.environ, "RLX_REGISTRY": registry}
    with serve("web", "--no-token", environment=environment) as (_, port):
        yield f"http://127.0.0.1:{port}"


def _accepts_connections(process: "subprocess.Popen[str]", port: int) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"rlx ended: {process.communicate()[1]}")
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False
