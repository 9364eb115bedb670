"""What a rank and its worker process say to each other: JSON, bytes, and open files."""

import json
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Channel"]


class Channel:
    """One end of a private two-way pipe.

    A message costs no pickle and runs no code. Whoever uses it learns from `EOFError` or `OSError`
    that the other process is gone.

    Args:
        end: of a duplex `multiprocessing.Pipe`.
    """

    def __init__(self, end: Connection) -> None:
        self._end = end

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends what JSON can say."""
        self._end.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Waits for the next message."""
        message: dict[str, Any] = json.loads(self._end.recv_bytes())
        return message

    def send_bytes(self, content: bytes | memoryview) -> None:
        """Sends bytes as they are."""
        self._end.send_bytes(content)

    def receive_bytes(self) -> bytes:
        """Waits for bytes."""
        return self._end.recv_bytes()

    def wait_for_message(self, seconds: float) -> bool:
        """Waits until there is something to receive, or the other process is gone."""
        return self._end.poll(seconds)

    def send_file(self, descriptor: int) -> None:
        """Hands over an open file; this process keeps its own hold of it."""
        reduction.send_handle(self._end, descriptor, 0)

    def receive_file(self) -> int:
        """Waits for the descriptor of an open file, to be closed by the caller."""
        descriptor: int = reduction.recv_handle(self._end)
        return descriptor

    def close(self) -> None:
        """The other process sees the end."""
        self._end.close()
