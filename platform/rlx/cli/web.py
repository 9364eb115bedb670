"""`rlx web` and `rlx mlflow`: serve the dashboard and MLflow's UI."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from rlx.cli.completion import complete_run
from rlx.cli.options import registry_option
from rlx.cli.output import print_text
from rlx.cli.serving import access_options, choose_address
from rlx.errors import RlxError, SpecError
from rlx.launch import create_missing_registry, get_mlflow_uri, open_registry
from rlx.spec import TrackingSpec
from rlx.text import escape_unprintable
from rlx_registry import MLFLOW_START_PAGE, find_mlflow_charts, find_mlflow_link

__all__ = ["mlflow", "web"]

NEWEST = 50
"""Runs among which `rlx mlflow` looks for one that the store has."""


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
@click.argument("runs", nargs=-1, metavar="[RUN|GROUP|NAME]...", shell_complete=complete_run)
@access_options(port=5000)
@click.option(
    "--uri",
    envvar="MLFLOW_BACKEND_STORE_URI",
    help="URI of the MLflow store; by default that of the named runs, or the one in RLX_HOME. One "
    "with a password belongs in MLFLOW_BACKEND_STORE_URI: other users of this machine can see a "
    "command line.",
)
@registry_option
def mlflow(runs: tuple[str, ...], uri: str | None, url: str, **options: Any) -> int:
    """Serve the MLflow UI with the mirrored runs.

    The printed address opens the page of the named RUN or the comparison of several, and without
    names the curves of the newest run's experiment. Every request needs the token, a random one by
    default: open the printed address once. MLflow clients send MLFLOW_TRACKING_TOKEN.
    """
    from rlx.home import format_path, get_rlx_home, tracking_url
    from rlx.record import ensure_store, require_free_port, ui_command
    from rlx_web.mlflow_app import MLFLOW_APP, export_mlflow_access

    address = choose_address(**options)
    page, own_uri = _find_named_page(runs, url) if runs else (None, None)
    store = tracking_url(uri or own_uri or TrackingSpec().mlflow or "")
    page = page or _find_newest_page(store, url)
    path = Path(store.removeprefix("sqlite:///").partition("?")[0])
    if store.startswith("sqlite:///") and not path.exists():
        raise SpecError(f"there is no MLflow store at {format_path(path)} yet: run something")
    if made := ensure_store(store):  # a store that was moved needs its new place
        print_text(f"warning: {made}", err=True)
    require_free_port(address.host, address.port)
    command, environment = ui_command(
        store, get_rlx_home() / "mlartifacts", address.host, address.port
    )
    address.print_link("MLflow", "can read, change and delete every run in MLflow", page)
    sys.stdout.flush()
    access = export_mlflow_access(address.token, address.names, address.port)
    os.execve(command[0], [*command, "--app-name", MLFLOW_APP], {**environment, **access})


def _find_named_page(names: tuple[str, ...], url: str) -> tuple[str, str]:
    """Returns the page of the named runs, and the URI of their store.

    Raises:
        SpecError: a name is unknown, or the runs are in no store that can be served here.
    """
    from rlx.results import find_named_runs

    with open_registry(url) as registry:
        runs = find_named_runs(registry, names)
    link = find_mlflow_link(runs)
    if link is None:
        several = ", ".join(run.id for run in runs)
        raise SpecError(
            f"MLflow has no records of {several} yet; `rlx sync` sends those of ended runs"
        )
    if link.store is None:
        raise SpecError(f"these runs are on an MLflow server: open {escape_unprintable(link.url)}")
    return link.page, link.store


def _find_newest_page(store: str, url: str) -> str:
    """Returns the charts of the newest run in a store, or the list of MLflow's experiments."""
    from rlx.home import tracking_url

    with suppress(RlxError), open_registry(url) as registry:
        for run in registry.runs(limit=NEWEST):
            uri = get_mlflow_uri(run)
            if run.mlflow_run_id is not None and uri and tracking_url(uri) == store:
                return find_mlflow_charts(run)
    return MLFLOW_START_PAGE
