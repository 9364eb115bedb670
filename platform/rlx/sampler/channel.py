"""Channel between a rank and its worker process for JSON, bytes, and open files."""

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Channel"]


class Channel:
    """One end of a private two-way pipe.

    Messages are not pickled, so receiving one runs no code. All methods raise `EOFError` or
    `OSError` if the other process is gone.

    Args:
        end: one end of a duplex `multiprocessing.Pipe`.
    """

    def __init__(self, end: Connection) -> None:
        self._end = end

    def fileno(self) -> int:
        """The descriptor that becomes readable when a message arrives, or the other end is gone."""
        return self._end.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message as JSON."""
        self._end.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Waits for the next message."""
        message: dict[str, Any] = json.loads(self._end.recv_bytes())
        return message

    def send_bytes(self, content: bytes | memoryview) -> None:
        """Sends raw bytes."""
        self._end.send_bytes(content)

    def receive_bytes(self) -> bytes:
        """Waits for bytes."""
        return self._end.recv_bytes()

    def wait_for_message(self, seconds: float) -> bool:
        """Waits until a message arrives or the other process ends; False after the timeout."""
        return self._end.poll(seconds)

    def send_file(self, descriptor: int) -> None:
        """Sends an open file; this process keeps its own descriptor."""
        reduction.send_handle(self._end, descriptor, 0)

    def receive_file(self) -> int:
        """Waits for the descriptor of an open file, which the caller must close."""
        descriptor: int = reduction.recv_handle(self._end)
        return descriptor

    def hang_up(self) -> None:
        """Ends the exchange: this process and the other one receive `EOFError`, also a thread that
        waits for a message, which can then close the channel."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._end.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the channel; the other process receives `EOFError`."""
        self._end.close()
