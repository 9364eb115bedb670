"""MLflow's own user interface over our store, in as little memory as it can do with.

Started as it comes, `mlflow server` is fourteen processes and two gigabytes; started like this it
is two processes and half a gigabyte.
"""

import errno
import os
import socket
import sys
from pathlib import Path

from rlx.errors import EnvironmentFault
from rlx.record.mlflow_client import quiet_environment

__all__ = ["require_free_port", "ui_command"]


def ui_command(
    uri: str, artifact_root: Path | str, host: str = "127.0.0.1", port: int = 5000
) -> tuple[list[str], dict[str, str]]:
    """Returns the command that serves MLflow's user interface, and its whole environment.

    SIGTERM or Ctrl-C ends it and its one child; SIGKILL has to go to the process group.

    Args:
        uri: MLflow's store, `sqlite:///path`.
        artifact_root: folder for files of runs that other clients send to this server.
        host: address to listen on. MLflow has no passwords: anything but this machine is open.
        port: see `require_free_port`.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--artifacts-destination", str(artifact_root)]
    command += ["--host", host, "--port", str(port), "--workers", "1"]
    small = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return command, {**quiet_environment(), **os.environ, **small}


def require_free_port(host: str, port: int) -> None:
    """Checks that a server could listen there.

    Raises:
        EnvironmentFault: the port is taken, not permitted, or the host is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port whose last connection is still being buried is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise EnvironmentFault(
            f"port {port} on {host} {why}; choose another with --port"
        ) from error
