"""How a vLLM worker answers several ranks at once.

The rank that started it also sends it weights. As a server of a pool it takes requests of any rank
of the machine, and generates the rows of all of them together. A request names the version of the
weights that it wants at least, and waits for them. No rank therefore has to know which weights a
server has, also if that was just started again. New weights do not wait for rows that are being
generated: these go on with them.
"""

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from rlx.sampler.channel import Channel

__all__ = ["RowGenerator", "serve"]


class RowGenerator(Protocol):
    """What generates; see `rlx.sampler.vllm_worker.VllmWorker`."""

    version: int | None

    @property
    def context_length(self) -> int: ...
    @property
    def takes_adapter(self) -> bool: ...
    @property
    def is_generating(self) -> bool: ...
    @property
    def can_begin(self) -> bool: ...

    def answer(self, message: Mapping[str, Any], channel: Channel) -> dict[str, Any]: ...
    def begin(self, message: Mapping[str, Any], channel: Channel) -> None: ...
    def step(self) -> Iterator[tuple[Channel, dict[str, Any]]]: ...


def serve(worker: RowGenerator, keeper: Channel, place: str | None = None) -> None:
    """Answers until the rank that started the worker is gone.

    Args:
        keeper: from that rank.
        place: path of a socket that other requests come through; None if only that rank asks.

    Raises:
        EOFError: the rank is gone.
    """
    listener = None if place is None else _listen(Path(place))
    clients: list[Channel] = []
    waiting: list[tuple[Channel, dict[str, Any]]] = []
    while True:
        channels = {channel.fileno(): channel for channel in (keeper, *clients)}
        listening = {listener.fileno(): listener} if listener else {}
        has_work = worker.is_generating or any(wants(message, worker) for _, message in waiting)
        for ready in wait([*channels, *listening], 0 if has_work else None):
            assert isinstance(ready, int)
            if ready in listening:
                clients += _accept(listening[ready], worker)
                continue
            channel = channels[ready]
            try:
                message = channel.receive()
            except (EOFError, OSError):
                if channel is keeper:
                    raise EOFError from None
                clients.remove(channel)
                channel.close()
                continue
            if message["ask"] == "generate":
                waiting.append((channel, message))
            else:
                keeper.send(worker.answer(message, keeper))
        waiting, before = [], waiting
        for channel, message in before:
            if wants(message, worker) and worker.can_begin:
                worker.begin(message, channel)
            else:
                waiting.append((channel, message))
        if worker.is_generating:
            for channel, answer in worker.step():
                with suppress(OSError):  # it is gone, which its end of the pipe reports
                    channel.send(answer)


def wants(message: Mapping[str, Any], worker: RowGenerator) -> bool:
    """Whether a worker has the weights that a request wants, or later ones."""
    wanted = message.get("version")
    return wanted is None or (worker.version is not None and worker.version >= wanted)


def _listen(place: Path) -> socket.socket:
    """Listens at a path, also if a killed server has left its socket there."""
    place.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen()
    return listener


def _accept(listener: socket.socket, worker: RowGenerator) -> Iterator[Channel]:
    """Accepts a rank, and tells it what it may ask for."""
    connection, _ = listener.accept()
    channel = Channel(Connection(connection.detach()))
    with suppress(OSError):
        channel.send({"longest": worker.context_length, "takes_adapter": worker.takes_adapter})
        yield channel
