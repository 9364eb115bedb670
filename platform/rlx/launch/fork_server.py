"""Forks ranks, which import nothing: `python -m rlx.launch.fork_server FOLDER RUN_ID`.

The process imports what ranks need, once, and does nothing else: no thread may run and no device
may be in use when it is forked. On its standard input, a socket, each line is the environment of
one rank as JSON; the answer is the rank's process id. It ends when the supervisor closes the
socket, or is gone. A rank is the supervisor's child: the process that forks it ends at once, and
the supervisor adopts orphans.

Hardly anything is imported at module level, as in `rlx.launch.rank`.
"""

import json
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path

from rlx.descendants import name_process

NAME, RANK_NAME = "rlx-forkserver", "rlx-rank"
"""What the kernel calls this process and its forks, whose command lines are alike."""
WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps pyarrow from starting a thread, which a fork would lack. OpenBLAS, which starts threads if
`runner.threads` is above 1, ends them before a fork by itself."""


def main(folder: str, run_id: str) -> int:
    """Forks ranks until the supervisor needs no more; each rank returns from here as well."""
    name_process(NAME)
    orders = socket.socket(fileno=os.dup(0))
    _close_input()
    from rlx.launch.rank import import_libraries, show_activity, write_failure
    from rlx.launch.rank import main as run_rank

    os.environ |= WITHOUT_THREADS
    try:
        show_activity(Path(folder), "libraries")
        import_libraries(on_cpu=True)
    except Exception as error:  # noqa: BLE001  (recorded, and the attempt ends)
        write_failure(Path(folder), error)
        traceback.print_exc()
        return 1
    if _serve(orders):
        return run_rank(folder, run_id)
    os._exit(0)  # libraries would print on their way out


def _serve(orders: socket.socket) -> bool:
    """Forks a rank per order. Returns True in each of them, and False when no more are needed."""
    with orders, orders.makefile("rb") as lines:
        for line in lines:
            if _fork_rank(orders):
                os.environ.clear()
                os.environ.update(json.loads(line))
                tempfile.tempdir = None  # read from the environment again
                return True
    return False


def _fork_rank(orders: socket.socket) -> bool:
    """Returns True in the rank; here, tells its process id to the supervisor, its parent by now."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        os.waitpid(between, 0)
        orders.sendall(os.read(reading, 64))
        os.close(reading)
        return False
    rank = os.fork()
    if rank:
        os.write(writing, f"{rank}\n".encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    os.setsid()
    name_process(RANK_NAME)
    return True


def _close_input() -> None:
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)


if __name__ == "__main__":
    from rlx.launch.log_lines import stamp_output

    stamp_output()
    sys.exit(main(*sys.argv[1:]))
