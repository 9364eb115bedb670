"""Command that serves MLflow's web UI with little memory.

By default, `mlflow server` starts fourteen processes and uses two gigabytes. With these settings it
starts two processes and uses half a gigabyte.
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
    """Returns the command that serves MLflow's web UI, and its complete environment.

    SIGTERM or Ctrl-C ends it and its only child; SIGKILL must be sent to the process group.

    Args:
        uri: MLflow's store, `sqlite:///path`. It may contain a password, so the command does not
            have it, but the environment.
        artifact_root: folder for artifacts that other clients upload to this server.
        host: address to listen on. MLflow alone has no authentication, so any address other than
            localhost exposes the store; `rlx web --mlflow` puts a guard in front.
        port: see `require_free_port`.
    """
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--artifacts-destination", str(artifact_root)]
    command += ["--host", host, "--port", str(port), "--workers", "1"]
    # Its lines would contain the address with the token.
    command += ["--uvicorn-opts", "--no-access-log"]
    small = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    store = {"MLFLOW_BACKEND_STORE_URI": uri}
    return command, {**quiet_environment(), **os.environ, **small, **store}


def require_free_port(host: str, port: int) -> None:
    """Checks that a server could listen there.

    Raises:
        EnvironmentFault: the port is taken or not permitted, or `host` is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port with connections in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        why = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        )
        raise EnvironmentFault(
            f"port {port} on {host} {why}; choose another with --port"
        ) from error
