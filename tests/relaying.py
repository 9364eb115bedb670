"""Starts of rlx on behalf of daemons, such as Slurm's, whose children are no forks.

A daemon starts `relay.py` in place of a command. That hands its open files and its environment to
the tests' process, which starts the command as it starts rlx itself: by a fork with
`pytest --forks`. The relay passes on what signals it gets, and ends as the command ends.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import psutil

__all__ = ["serve_relays"]

MESSAGE, FILES = 1 << 17, 3


@contextmanager
def serve_relays(folder: Path) -> Iterator[str]:
    """Serves relays until the block ends; gives what a daemon puts before a command.

    Args:
        folder: of the socket; its path must be short.
    """
    path = str(folder / "relays")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        accepting = Thread(target=_accept_relays, args=(listening,), daemon=True)
        accepting.start()
        relay = str(Path(__file__).with_name("relay.py"))
        yield shlex.join([sys.executable, "-I", "-S", relay, path])
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()


def _accept_relays(listening: socket.socket) -> None:
    with suppress(OSError):  # it is closed
        while True:
            relay, _ = listening.accept()
            Thread(target=_stand_behind, args=(relay,), daemon=True).start()


def _stand_behind(relay: socket.socket) -> None:
    """Starts what a relay asks for, and signals it as the relay is signalled, also killed."""
    message, files, _, _ = socket.recv_fds(relay, MESSAGE, FILES)
    request = json.loads(message)
    stdin, stdout, stderr = files
    process = subprocess.Popen(
        request["words"],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=request["cwd"],
        env=request["environment"],
        start_new_session=True,
    )
    for file in files:
        os.close(file)
    waiting = Thread(target=_tell_end, args=(process, relay), daemon=True)
    waiting.start()
    while said := relay.recv(64):
        _signal_tree(process, int(said))
    if process.poll() is None:
        _signal_tree(process, signal.SIGKILL)
    waiting.join()
    relay.close()


def _tell_end(process: "subprocess.Popen[bytes]", relay: socket.socket) -> None:
    code = process.wait()
    with suppress(OSError):  # it has been killed
        relay.send(str(code).encode())


def _signal_tree(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Signals a process and all its descendants, as Slurm does."""
    with suppress(psutil.Error):
        root = psutil.Process(process.pid)
        for one in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                one.send_signal(number)
