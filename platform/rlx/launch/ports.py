"""Ports of this machine for processes that will start."""

import socket
from contextlib import suppress
from secrets import SystemRandom

from rlx.errors import EnvironmentFault

__all__ = ["find_free_port"]

PORTS = range(20_000, 30_000)
"""Above Ray's workers, and below what systems give to processes that ask for any port."""


def find_free_port() -> int:
    """Returns a port that is free at the moment.

    It may be used some seconds later, so it is none of those that another process gets meanwhile
    without having chosen it.

    Raises:
        EnvironmentFault: all of them are in use.
    """
    for port in SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port
    raise EnvironmentFault(f"every port from {PORTS[0]} to {PORTS[-1]} is in use")
