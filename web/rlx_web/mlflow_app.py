"""MLflow's server behind the guard of the dashboard.

`mlflow server --app-name rlx` serves this application: the name is an entry point in the group
`mlflow.app`, MLflow's way of putting an application in front of its own.
"""

import json
import os
from collections.abc import Collection

from starlette.types import ASGIApp

from rlx_web.access import Access, AccessGuard

__all__ = ["MLFLOW_APP", "create_mlflow_app", "export_mlflow_access"]

MLFLOW_APP = "rlx"
"""The name of the entry point."""
ACCESS = "RLX_MLFLOW_ACCESS"


def export_mlflow_access(token: str | None, hosts: Collection[str], port: int) -> dict[str, str]:
    """Returns the environment of `mlflow server` with which it accepts these requests.

    The token is in the environment, which other users cannot read, and not on the command line.

    Args:
        token: token required for every request; None lets everyone in who can connect.
        hosts: accepted host names, without ports.
        port: of the server.
    """
    names = sorted(f"[{host}]" if ":" in host else host for host in hosts)
    return {
        ACCESS: json.dumps({"token": token, "hosts": sorted(hosts)}),
        # The guard checks `Host`; MLflow rejects writing from origins that it does not know.
        "MLFLOW_SERVER_ALLOWED_HOSTS": "*",
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{port}" for name in names),
    }


def create_mlflow_app() -> ASGIApp:
    """Returns MLflow's application behind the guard, as the environment describes it.

    Raises:
        RuntimeError: the environment does not say which requests to accept.
    """
    if ACCESS not in os.environ:
        raise RuntimeError(f"{ACCESS} is not set: start this server by `rlx web --mlflow`")
    from mlflow.server.fastapi_app import app

    return AccessGuard(app, Access(**json.loads(os.environ[ACCESS])))
