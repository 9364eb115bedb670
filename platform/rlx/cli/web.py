"""`rlx web`: serves the dashboard, or the UI of MLflow."""

import errno
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import click

from rlx.cli.output import print_text
from rlx.cli.verb_group import Command, complete_run, registry_option
from rlx.descendants import die_with_parent
from rlx.errors import EnvironmentFault, RlxError, SpecError
from rlx.launch import create_missing_registry, open_registry
from rlx.spec import TrackingSpec
from rlx.text import escape_unprintable

DASHBOARD_PORT, MLFLOW_PORT = 8711, 5000
POLL_SECONDS = 0.2
"""Seconds between two looks whether MLflow answers."""
RUNS_SEARCHED = 50
"""Newest runs among which one is looked for that MLflow's store has."""


PORT = click.IntRange(1, 65535)
TOKEN = "RLX_WEB_TOKEN"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")
SHORTEST = 16
"""Minimum number of characters of an access token."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens, and whom it lets in.

    Attributes:
        token: token of every request; None lets everyone in who can connect.
        names: host names that requests may use.
        is_named: whether the user named the token, so that it is not printed.
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

    def print_link(self, server: str, powers: str, page: str = "") -> None:
        """Prints the address to stderr, and without a token what others can do.

        Args:
            server: what is served.
            powers: what everyone can do who can connect.
            page: fragment of the page to open, if it is not the first.
        """
        if self.token is None:
            print_text(
                f"warning: --no-token: everyone who can connect to port {self.port}, such as every "
                f"user of this machine, {powers}",
                err=True,
            )
        link = f"{self.link}/" if page and not self.token else self.link
        print_text(f"{server} on {link}{page}  (Ctrl-C to stop)", err=True)


def access_options(ports: str, anyone: str) -> Callable[[Command], Command]:
    """Returns the options whose values `choose_address` takes.

    Args:
        ports: says which port is the default.
        anyone: says whom `--no-token` lets in.
    """
    options = (
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="The address to listen on."
        ),
        click.option("--port", type=PORT, help=ports),
        click.option(
            "--token",
            envvar=TOKEN,
            metavar="TEXT",
            help=f"Access token; by default a random one. Prefer {TOKEN}: other users of this "
            "machine can see a command line.",
        ),
        click.option("--no-token", "is_open", is_flag=True, help=anyone),
    )
    return lambda command: reduce(lambda decorated, one: one(decorated), options[::-1], command)


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN|GROUP|NAME]...", shell_complete=complete_run)
@click.option("--mlflow", is_flag=True, help="Serve MLflow's UI with the mirrored runs.")
@access_options("8711 by default, and 5000 with --mlflow.", "Let in everyone who can connect.")
@click.option(
    "--name", "names", multiple=True, metavar="HOST", help="Another host name of this machine."
)
@click.option(
    "--uri",
    envvar="MLFLOW_BACKEND_STORE_URI",
    help="With --mlflow: URI of the store; by default that of the named runs, or the one in "
    "RLX_HOME. One with a password belongs in MLFLOW_BACKEND_STORE_URI: other users of this "
    "machine can see a command line.",
)
@registry_option
def web(runs: tuple[str, ...], mlflow: bool, uri: str | None, url: str, **options: Any) -> int:
    """Serve the dashboard: runs, rollouts, and per-token credit.

    Every reader needs the token, a random one by default: open the printed address once. The
    dashboard is read-only except for the request to stop a run. A missing SQLite registry is
    created. Traffic is not encrypted: use a reverse proxy on an untrusted network.

    With --mlflow, the printed address opens MLflow's page of the named RUN or the comparison of
    several, and without names the curves of the newest run's experiment. MLflow itself has no
    token: everyone who can connect to its port can read, change and delete its runs.
    """
    if mlflow:
        return serve_mlflow(runs, uri, url, options["host"], options["port"] or MLFLOW_PORT)
    if runs:
        raise SpecError("name runs with --mlflow; the dashboard shows every run")
    return serve_dashboard(url, options)


def choose_address(
    default_port: int,
    *,
    host: str,
    port: int | None,
    token: str | None,
    is_open: bool,
    names: tuple[str, ...] = (),
) -> ServerAddress:
    """Returns the address that the options describe, with a random token unless one was named.

    Raises:
        SpecError: the token is too short or contains odd characters, or a name is not a host's.
    """
    if is_open and token is not None:
        raise SpecError(f"--no-token and a token: leave out one of them (also {TOKEN})")
    if token is not None and len(token) < SHORTEST:
        raise SpecError(f"the token is too short: use {SHORTEST} characters or more")
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise SpecError("the token must consist of printable ASCII characters, without spaces")
    if odd := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+", name)]:
        raise SpecError(
            f"--name {escape_unprintable(odd[0])}: a host's name, without scheme or port"
        )
    chosen = None if is_open else token or secrets.token_urlsafe(24)
    return ServerAddress(
        host,
        port or default_port,
        chosen,
        frozenset(_list_host_names(host, names)),
        token is not None,
    )


def _list_host_names(host: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yields every host name that requests to this machine may use."""
    yield from (name.lower() for name in (*LOOPBACK, host, *names))
    if host in EVERYWHERE:
        import psutil

        yield from (socket.gethostname().lower(), socket.getfqdn().lower())
        for addresses in psutil.net_if_addrs().values():
            yield from (a.address.partition("%")[0].lower() for a in addresses)


def serve_dashboard(url: str, options: Mapping[str, Any]) -> int:
    """Serves the dashboard until Ctrl-C. A missing SQLite registry is created."""
    import uvicorn

    from rlx.home import tracking_url
    from rlx.record import find_mlflow_link
    from rlx_web import Access, create_app

    address = choose_address(DASHBOARD_PORT, **options)
    create_missing_registry(url)
    with open_registry(url):
        pass
    require_free_port(address.host, address.port)
    address.print_link("dashboard", "can read every rollout, and stop runs")
    app = create_app(tracking_url(url), Access(address.token, address.names), find_mlflow_link)
    config = uvicorn.Config(
        app, host=address.host, port=address.port, log_level="warning", lifespan="off",
        server_header=False,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):  # `uvicorn.run` would exit with 3 on an early interrupt
        uvicorn.Server(config).run()
    return 130  # only Ctrl-C ends it without an error


def serve_mlflow(runs: tuple[str, ...], uri: str | None, url: str, host: str, port: int) -> int:
    """Runs MLflow's server until Ctrl-C; the printed address opens the page of `runs`.

    Returns:
        Its exit code.
    """
    from rlx.home import format_path, get_rlx_home, tracking_url
    from rlx.record import MLFLOW_ENVIRONMENT, prepare_store

    page, own_uri = _find_named_page(runs, url) if runs else (None, None)
    store = tracking_url(uri or own_uri or TrackingSpec().mlflow or "")
    page = page or _find_newest_page(store, url)
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
            while server.poll() is None and not _is_answering(host, port):
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


def _is_answering(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


def _find_named_page(names: tuple[str, ...], url: str) -> tuple[str, str]:
    """Returns the page of the named runs, and the URI of their store.

    Raises:
        SpecError: a name is unknown, or the runs are in no store that can be served here.
    """
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


def _find_newest_page(store: str, url: str) -> str:
    """Returns the charts of the newest run in a store, or the list of MLflow's experiments."""
    from rlx.home import tracking_url
    from rlx.record import MLFLOW_START_PAGE, find_mlflow_charts, get_mlflow_uri

    with suppress(RlxError), open_registry(url) as registry:
        for run in registry.runs(limit=RUNS_SEARCHED):
            uri = get_mlflow_uri(run)
            if run.mlflow_run_id is not None and uri and tracking_url(uri) == store:
                return find_mlflow_charts(run)
    return MLFLOW_START_PAGE


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
        taken = error.errno == errno.EADDRINUSE
        why = "is in use" if taken else f"cannot be used: {error.strerror}"
        raise EnvironmentFault(
            f"port {port} on {host} {why}; choose another with --port"
        ) from error
