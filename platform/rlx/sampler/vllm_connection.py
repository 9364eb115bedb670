"""The connections to a vLLM server of this machine: one for every request at the same time."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from rlx.errors import RlxError
from rlx.sampler.channel import Channel
from rlx.sampler.vllm_keeper import FAILURE, get_socket, print_line

__all__ = ["ServerConnection", "ServerConnections"]

LOOK = 0.1
"""Seconds between two attempts to reach a server that is being started."""
GONE = 10.0
"""Seconds without a pool's folder after which a rank ends: the first one has said why by then."""


class ServerConnection:
    """The connection to one server of the pool in a folder, whichever process it is.

    Args:
        place: the pool's folder.
        number: the server's.
        report: called with a line if the server has not answered; by default, prints it.
    """

    def __init__(
        self, place: Path, number: int, report: Callable[[str], None] = print_line
    ) -> None:
        self._place, self._number, self._report = place, number, report
        self._channel: Channel | None = None
        self._is_closed = False

    def reach(self) -> dict[str, Any]:
        """Connects, as soon as the server is there; returns what it says of itself.

        Raises:
            RlxError: the pool has failed, or this rank has left it.
            ConnectionError: the machine's first rank has left it.
        """
        was_there, missed = self._channel is not None, 0.0
        while not self._is_closed:
            if (failure := self._place / FAILURE).exists():
                raise RlxError(failure.read_text())
            with suppress(EOFError, OSError):
                address = str(get_socket(self._place, self._number))
                self._channel = Channel(Client(address, "AF_UNIX"))
                if not self._is_closed:  # `close` ends this exchange from now on
                    return self._channel.receive()
            time.sleep(LOOK)
            missed += LOOK if was_there and not self._place.exists() else 0
            if missed > GONE:
                raise ConnectionError("this machine's first rank has left the pool of vLLM servers")
        raise RlxError("this rank has left the pool of vLLM servers")

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message and waits for the answer; asks again if the server was replaced.

        Raises:
            RlxError: the pool has failed, or this rank has left it.
            ConnectionError: the machine's first rank has left it.
        """
        while True:
            channel = self._channel
            assert channel is not None
            try:
                channel.send(message)
                return channel.receive()
            except (EOFError, OSError):
                channel.close()
            if not self._is_closed:
                self._report(
                    f"vLLM server {self._number} has not answered {len(message['rows'])} rows: "
                    "they are asked again of the one that replaces it"
                )
            self.reach()

    def close(self) -> None:
        """Closes the connection for good, also for a thread that waits for an answer."""
        self._is_closed = True
        if self._channel is not None:
            self._channel.hang_up()


class ServerConnections:
    """Connections to one server, for any number of threads; see `ServerConnection`.

    Args:
        place: the pool's folder.
        number: the server's.
        report: as for `ServerConnection`.
    """

    def __init__(
        self, place: Path, number: int, report: Callable[[str], None] = print_line
    ) -> None:
        self._settings = place, number, report
        self._all: list[ServerConnection] = []
        self._idle: list[ServerConnection] = []
        self._is_closed = False

    def reach(self) -> dict[str, Any]:
        """Opens a connection; see `ServerConnection.reach`."""
        connection = ServerConnection(*self._settings)
        self._all.append(connection)
        if self._is_closed:
            connection.close()
        told = connection.reach()
        self._idle.append(connection)
        return told

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message over a connection of its own; see `ServerConnection.ask`."""
        while True:
            with suppress(IndexError):  # all are in use
                connection = self._idle.pop()
                break
            self.reach()
        answer = connection.ask(message)
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Closes all connections for good, also for threads that wait for an answer."""
        self._is_closed = True
        for connection in self._all:
            connection.close()
