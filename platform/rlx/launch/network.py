"""Free ports of this machine, and the network interface that leads to another one."""

import socket
from contextlib import suppress
from secrets import SystemRandom

import psutil

from rlx.errors import EnvironmentFault

__all__ = ["find_free_port", "find_network_interface"]

CHOSEN_PORTS = range(20_000, 30_000)
"""Above Ray's workers, and below what systems give to processes that ask for any port."""


def find_free_port() -> int:
    """Returns a port that is free at the moment.

    It may be used some seconds later, so it is none of those that another process gets meanwhile
    without having chosen it.

    Raises:
        EnvironmentFault: all of them are in use.
    """
    for port in SystemRandom().sample(CHOSEN_PORTS, len(CHOSEN_PORTS)):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port
    raise EnvironmentFault(f"every port from {CHOSEN_PORTS[0]} to {CHOSEN_PORTS[-1]} is in use")


def find_network_interface(address: str) -> str | None:
    """The network interface through which this machine reaches an address."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as one:
        one.connect(target)  # sends nothing
        mine = one.getsockname()[0]
    named = {
        each.address.split("%")[0]: name
        for name, found in psutil.net_if_addrs().items()
        for each in found
    }
    return named.get(mine)
