"""Options of commands that serve web pages: where to listen, and who may read."""

import errno
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from rlx.cli.output import print_text
from rlx.errors import EnvironmentFault, SpecError
from rlx.text import escape_unprintable

__all__ = ["PORT", "ServerAddress", "access_options", "choose_address", "require_free_port"]

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


def access_options(port: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds the options; `choose_address` takes their values.

    Args:
        port: default port.
    """
    options = [
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="The address to listen on."
        ),
        click.option("--port", type=PORT, default=port, show_default=True),
        click.option(
            "--token",
            envvar=TOKEN,
            metavar="TEXT",
            help=f"Access token; by default a random one. Prefer {TOKEN}: other users of this "
            "machine can see a command line.",
        ),
        click.option(
            "--no-token", "is_open", is_flag=True, help="Let in everyone who can connect."
        ),
        click.option(
            "--name",
            "names",
            multiple=True,
            metavar="HOST",
            help="Additional host name that browsers use.",
        ),
    ]

    def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add_options


def choose_address(
    host: str, port: int, token: str | None, is_open: bool, names: tuple[str, ...]
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
        host, port, chosen, frozenset(_list_host_names(host, names)), token is not None
    )


def _list_host_names(host: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yields every host name that requests to this machine may use."""
    yield from (name.lower() for name in (*LOOPBACK, host, *names))
    if host in EVERYWHERE:
        import psutil

        yield from (socket.gethostname().lower(), socket.getfqdn().lower())
        for addresses in psutil.net_if_addrs().values():
            yield from (a.address.partition("%")[0].lower() for a in addresses)


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
