"""`rlx web`: serves the dashboard."""

import re
import socket
from collections.abc import Iterator
from contextlib import suppress

import click

from rlx.cli.inspect_runs import PORT
from rlx.cli.registry import open_registry, registry_option
from rlx.errors import SpecError
from rlx.text import escape_unprintable

__all__ = ["web"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")
SHORTEST = 16
"""Minimum number of characters of an access token."""


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=PORT, default=8711, show_default=True)
@click.option(
    "--token",
    envvar="RLX_WEB_TOKEN",
    metavar="TEXT",
    help="Access token; required for any host but this machine.",
)
@click.option(
    "--name", "names", multiple=True, metavar="HOST", help="Additional host name that browsers use."
)
@registry_option
def web(host: str, port: int, token: str | None, names: tuple[str, ...], url: str) -> int:
    """Serve the dashboard: runs, rollouts, and per-token credit.

    The dashboard is read-only except for two requests: stop a run, and queue it again. On a host
    other than this machine, every reader needs the token: open http://HOST:PORT/?token=TEXT once.
    Traffic is not encrypted: use a reverse proxy on an untrusted network.
    """
    import uvicorn

    from rlx.cli.plugins import watch_plugin_health
    from rlx.home import tracking_url
    from rlx.record import require_free_port
    from rlx_web import Access, create_app
    from rlx_web.warm import warm_up_pages

    if host not in LOOPBACK and not token:
        raise SpecError(
            f"--host {escape_unprintable(host)} lets other machines in: give a --token, or "
            "RLX_WEB_TOKEN"
        )
    if token is not None and len(token) < SHORTEST:
        raise SpecError(f"the token is short: {SHORTEST} characters or more keep strangers out")
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise SpecError("the token is to be of ASCII letters, digits and signs, without blanks")
    if odd := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+", name)]:
        raise SpecError(
            f"--name {escape_unprintable(odd[0])}: a host's name, without scheme or port"
        )
    with open_registry(url):
        pass
    require_free_port(host, port)
    access = Access(hosts=frozenset(_list_host_names(host, names)), token=token)
    url_host = f"[{host}]" if ":" in host else host
    click.echo(f"dashboard on http://{url_host}:{port}  (Ctrl-C ends it)", err=True)
    app = create_app(tracking_url(url), access)
    warm_up_pages()
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", lifespan="off", server_header=False
    )
    # `uvicorn.run` would exit with 3 on an early interrupt
    with suppress(KeyboardInterrupt), watch_plugin_health(url):
        uvicorn.Server(config).run()
    return 130  # only Ctrl-C ends it without an error


def _list_host_names(host: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yields every host name that requests to this machine may use."""
    yield from (name.lower() for name in (*LOOPBACK, host, *names))
    if host in EVERYWHERE:
        import psutil

        yield from (socket.gethostname().lower(), socket.getfqdn().lower())
        for addresses in psutil.net_if_addrs().values():
            yield from (a.address.partition("%")[0].lower() for a in addresses)
