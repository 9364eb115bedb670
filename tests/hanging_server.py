"""A server that accepts every connection and answers a byte now and then, for ever."""

import socket
import threading
import time
from contextlib import contextmanager, suppress

DRIP_SECONDS = 0.05


class HangingServer:
    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._connections = []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self):
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._socket.close()
        for connection in self._connections:
            with suppress(OSError):  # the client has closed it
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._connections.append(connection)
                threading.Thread(target=self._drip, args=(connection,), daemon=True).start()

    @staticmethod
    def _drip(connection):
        with suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Never-Ends: ")
            while True:
                connection.sendall(b"x")
                time.sleep(DRIP_SECONDS)  # scenario


@contextmanager
def serve_hanging():
    server = HangingServer()
    try:
        yield server
    finally:
        server.close()
