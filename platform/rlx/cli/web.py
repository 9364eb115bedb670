"""`rlx web` and `rlx mlflow`: serve the dashboard and MLflow's UI."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from rlx.cli.options import registry_option
from rlx.cli.output import print_text
from rlx.cli.serving import access_options, choose_address
from rlx.errors import SpecError
from rlx.launch import create_missing_registry, open_registry

__all__ = ["mlflow", "web"]


@click.command()
@access_options(port=8711)
@registry_option
def web(url: str, **options: Any) -> int:
    """Serve the dashboard: runs, rollouts, and per-token credit.

    Every reader needs the token, a random one by default: open the printed address once. The
    dashboard is read-only except for three requests: stop a run, queue it again, and write a note
    on it. A missing SQLite registry is created. Traffic is not encrypted: use a reverse proxy on an
    untrusted network.
    """
    import uvicorn

    from rlx.cli.plugins import watch_plugin_health
    from rlx.home import tracking_url
    from rlx.record import require_free_port
    from rlx_web import Access, create_app
    from rlx_web.warm import warm_up_pages

    address = choose_address(**options)
    create_missing_registry(url)
    with open_registry(url):
        pass
    require_free_port(address.host, address.port)
    address.print_link("dashboard", "can read every rollout, and stop and resume runs")
    app = create_app(tracking_url(url), Access(address.token, address.names))
    warm_up_pages()
    config = uvicorn.Config(
        app, host=address.host, port=address.port, log_level="warning", lifespan="off",
        server_header=False,
    )  # fmt: skip
    # `uvicorn.run` would exit with 3 on an early interrupt
    with suppress(KeyboardInterrupt), watch_plugin_health(url):
        uvicorn.Server(config).run()
    return 130  # only Ctrl-C ends it without an error


@click.command()
@access_options(port=5000)
@click.option(
    "--uri",
    envvar="MLFLOW_BACKEND_STORE_URI",
    default="sqlite:///{home}/mlflow.db",
    help="URI of the MLflow store. One with a password belongs into MLFLOW_BACKEND_STORE_URI: "
    "other users of this machine can see a command line.",
)
def mlflow(uri: str, **options: Any) -> int:
    """Serve the MLflow UI with the mirrored runs.

    Every request needs the token, a random one by default: open the printed address once. MLflow
    clients send MLFLOW_TRACKING_TOKEN.
    """
    from rlx.home import format_path, get_rlx_home, tracking_url
    from rlx.record import ensure_store, require_free_port, ui_command
    from rlx_web.mlflow_app import MLFLOW_APP, export_mlflow_access

    address = choose_address(**options)
    store = tracking_url(uri)
    path = Path(store.removeprefix("sqlite:///").partition("?")[0])
    if store.startswith("sqlite:///") and not path.exists():
        raise SpecError(f"there is no MLflow store at {format_path(path)} yet: run something")
    if made := ensure_store(store):  # a store that was moved needs its new place
        print_text(f"warning: {made}", err=True)
    require_free_port(address.host, address.port)
    command, environment = ui_command(
        store, get_rlx_home() / "mlartifacts", address.host, address.port
    )
    address.print_link("MLflow", "can read, change and delete every run in MLflow")
    sys.stdout.flush()
    access = export_mlflow_access(address.token, address.names, address.port)
    os.execve(command[0], [*command, "--app-name", MLFLOW_APP], {**environment, **access})
