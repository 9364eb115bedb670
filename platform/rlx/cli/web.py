"""`rlx web`: serves the dashboard, or the UI of MLflow."""

import errno
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rlx.cli.output import print_text
from rlx.cli.verb_group import Command, add_options, registry_option
from rlx.descendants import die_with_parent
from rlx.errors import EnvironmentFault, SpecError
from rlx.launch import create_missing_registry, open_registry
from rlx.spec import TrackingSpec
from rlx.text import escape_unprintable

DASHBOARD_PORT, MLFLOW_PORT = 8711, 5000
POLL_SECONDS = 0.2
"""Seconds between two looks whether MLflow answers."""
TOKEN = "RLX_WEB_TOKEN"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")
SHORTEST = 16
"""Minimum number of characters of an access token."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens, and whom it lets in.

    Attributes:
        token: None lets everyone in who can connect; one that the user `is_named` is not printed.
        names: host names that requests may use.
    """

    host: str
    port: int
    token: str | None
    names: frozenset[str]
    is_named: bool

    @property
    def link(self) -> str:
        """The address to open in a browser: with the token, unless the user named it."""
        reached = socket.gethostname() if self.host in EVERYWHERE else self.host
        host = f"[{reached}]" if ":" in reached else reached
        shown = "..." if self.is_named else self.token
        return f"http://{host}:{self.port}" + (f"/?token={shown}" if self.token else "")

    def print_link(self) -> None:
        """Prints the dashboard's address to stderr, and without a token what others can do."""
        if self.token is None:
            print_text(
                f"warning: --no-token: everyone who can connect to port {self.port}, such as every "
                "user of this machine, can read every rollout, and stop runs",
                err=True,
            )
        print_text(f"dashboard on {self.link}  (Ctrl-C to stop)", err=True)


def access_options(ports: str, anyone: str) -> Callable[[Command], Command]:
    """The options whose values `choose_address` takes; with help on the port and `--no-token`."""
    return add_options(
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="The address to listen on."
        ),
        click.option("--port", type=click.IntRange(1, 65535), help=ports),
        click.option(
            "--token",
            envvar=TOKEN,
            metavar="TEXT",
            help=f"Access token; by default a random one. Prefer {TOKEN}: other users of this "
            "machine can see a command line.",
        ),
        click.option("--no-token", "is_open", is_flag=True, help=anyone),
    )


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN|GROUP|NAME]...")
@click.option("--mlflow", is_flag=True, help="Serve MLflow's UI with the mirrored runs.")
@access_options("8711 by default, and 5000 with --mlflow.", "Let in everyone who can connect.")
@click.option(
    "--name", "names", multiple=True, metavar="HOST", help="Another host name of this machine."
)
@registry_option
def web(runs: tuple[str, ...], mlflow: bool, url: str, **options: Any) -> int:
    """Serve the dashboard: runs, rollouts, and per-token credit.

    Every reader needs the token, a random one by default: open the printed address once. The
    dashboard is read-only except for the request to stop a run. A missing SQLite registry is
    created. Traffic is not encrypted: use a reverse proxy on an untrusted network.

    With --mlflow, the printed address opens MLflow's page of the named RUN or the comparison of
    several, and without names the list of experiments. Its store is that of the named runs, or the
    one in RLX_HOME, or MLFLOW_BACKEND_STORE_URI. MLflow itself has no token: everyone who can
    connect to its port can read, change and delete its runs.
    """
    if mlflow:
        return _serve_mlflow(runs, url, options["host"], options["port"] or MLFLOW_PORT)
    if runs:
        raise SpecError("name runs with --mlflow; the dashboard shows every run")
    from rlx.home import tracking_url
    from rlx.record import find_mlflow_link
    from rlx_web import Access, create_app

    address = choose_address(DASHBOARD_PORT, **options)
    create_missing_registry(url)
    with open_registry(url):
        pass
    require_free_port(address.host, address.port)
    address.print_link()
    app = create_app(tracking_url(url), Access(address.token, address.names), find_mlflow_link)
    return run_server(app, address)


def choose_address(
    default_port: int,
    *,
    host: str,
    port: int | None,
    token: str | None,
    is_open: bool,
    names: tuple[str, ...] = (),
) -> ServerAddress:
    """The address that the options describe, with a random token unless one was named."""
    if is_open and token is not None:
        raise SpecError(f"--no-token and a token: leave out one of them (also {TOKEN})")
    if token is not None and not re.fullmatch(rf"[!-~]{{{SHORTEST},}}", token):
        raise SpecError(
            f"the token is too short or odd: use {SHORTEST} printable ASCII characters or more, "
            "without spaces"
        )
    if odd := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+", name)]:
        raise SpecError(
            f"--name {escape_unprintable(odd[0])}: a host's name, without scheme or port"
        )
    served = [name.lower() for name in (*LOOPBACK, host, *names)]
    if host in EVERYWHERE:
        import psutil

        served += [socket.gethostname().lower(), socket.getfqdn().lower()]
        for addresses in psutil.net_if_addrs().values():
            served += [one.address.partition("%")[0].lower() for one in addresses]
    chosen = None if is_open else token or secrets.token_urlsafe(24)
    return ServerAddress(host, port or default_port, chosen, frozenset(served), token is not None)


def run_server(app: Any, address: ServerAddress, patience: int | None = None) -> int:
    """Serves an ASGI application until Ctrl-C, after which responses have `patience` seconds; then
    returns 130."""
    import uvicorn

    config = uvicorn.Config(
        app, host=address.host, port=address.port, log_level="warning", lifespan="off",
        server_header=False, timeout_graceful_shutdown=patience,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):  # `uvicorn.run` would exit with 3 on an early interrupt
        uvicorn.Server(config).run()
    return 130


def _serve_mlflow(runs: tuple[str, ...], url: str, host: str, port: int) -> int:
    """Runs MLflow's server until Ctrl-C; the printed address opens the page of `runs`."""
    from rlx.home import format_path, get_rlx_home, tracking_url
    from rlx.record import MLFLOW_ENVIRONMENT, MLFLOW_START_PAGE, prepare_store

    page, own_uri = _find_named_page(runs, url) if runs else (MLFLOW_START_PAGE, None)
    uri = os.environ.get("MLFLOW_BACKEND_STORE_URI") or own_uri or TrackingSpec().mlflow or ""
    store = tracking_url(uri)
    path = Path(store.removeprefix("sqlite:///").partition("?")[0])
    if store.startswith("sqlite:///") and not path.exists():
        raise SpecError(f"there is no MLflow store at {format_path(path)} yet: run something")
    prepare_store(store)  # a store that was moved needs its new place
    require_free_port(host, port)
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--host", host, "--port", str(port), "--uvicorn-opts", "--log-level warning"]
    command += ["--artifacts-destination", str(get_rlx_home() / "mlartifacts")]
    # Without jobs, fourteen processes and two gigabytes become two processes and half a gigabyte.
    small = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_BACKEND_STORE_URI": store}
    quiet = {**MLFLOW_ENVIRONMENT, "PYTHONWARNINGS": "ignore"}  # on what MLflow itself imports
    print_text("MLflow is starting", err=True)
    with subprocess.Popen(
        command,
        env={**quiet, **os.environ, **small},
        start_new_session=True,  # an interrupt that it receives itself ends it with a traceback
        preexec_fn=die_with_parent,
    ) as server:
        try:
            while server.poll() is None:
                with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
                    break
                time.sleep(POLL_SECONDS)
            if server.returncode is None:
                shown = f"[{host}]" if ":" in host else host
                print_text(f"MLflow on http://{shown}:{port}/{page}  (Ctrl-C to stop)", err=True)
                print_text(
                    f"warning: MLflow has no token: everyone who can connect to port {port}, such "
                    "as every user of this machine, can read, change and delete its runs",
                    err=True,
                )
            return server.wait()
        except KeyboardInterrupt:
            server.terminate()
            server.wait()
            return 130


def _find_named_page(names: tuple[str, ...], url: str) -> tuple[str, str]:
    """The page of the named runs, and the URI of their store, if that can be served here."""
    from rlx.record import find_mlflow_link
    from rlx.results import find_named_runs

    with open_registry(url) as registry:
        runs = find_named_runs(registry, names)
    link = find_mlflow_link(runs)
    if link is None:
        several = ", ".join(run.id for run in runs)
        raise SpecError(f"MLflow has no records of {several} yet; `rlx check --repair` sends them")
    if link.store is None:
        raise SpecError(f"these runs are on an MLflow server: open {escape_unprintable(link.url)}")
    return link.page, link.store


def require_free_port(host: str, port: int) -> None:
    """Raises EnvironmentFault if no server could listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port with connections in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is in use" if taken else f"cannot be used: {error.strerror}"
        raise EnvironmentFault(
            f"port {port} on {host} {why}; choose another with --port"
        ) from error
