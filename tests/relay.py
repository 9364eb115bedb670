"""Stands in a daemon's eyes for a process that the tests start for it: see `relaying`.

`python -I -S relay.py SOCKET COMMAND...`.
"""

import json
import os
import signal
import socket
import sys

PASSED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def main(path: str, words: list[str]) -> int:
    """Has the command started, passes signals on to it, and ends as it does."""
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.connect(path)
    request = {"words": words, "cwd": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
    socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
    for number in PASSED:
        signal.signal(number, lambda number, _: asked.send(str(number).encode()))
    for file in (0, 1, 2):  # these ends are the command's now
        os.dup2(os.open(os.devnull, os.O_RDWR), file)
    code = int(asked.recv(64) or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
