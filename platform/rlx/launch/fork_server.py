"""Forks ranks, which import nothing: `python -m rlx.launch.fork_server FOLDER RUN_ID`.

The process imports what ranks need, once, and does nothing else: no thread may run and no device
may be in use when it is forked. On its standard input, a socket, each line asks for ranks: as JSON,
the environment that they have in common, and what each adds to it. Every rank is answered by its
process id. The process ends when the supervisor closes the socket, or is gone. A rank is the
supervisor's child: the process that forks it ends at once, and the supervisor adopts orphans.

Hardly anything is imported at module level, as in `rlx.launch.rank`.
"""

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
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
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks where an import hangs
    orders = socket.socket(fileno=os.dup(0))
    _close_input()
    from rlx.launch.leftovers import remove_temporary_folder
    from rlx.launch.rank import import_libraries, show_activity, write_failure
    from rlx.launch.rank import main as run_rank

    os.environ |= WITHOUT_THREADS
    try:
        show_activity(Path(folder), "libraries")
        import_libraries(on_cpu=True)
        is_rank = _serve(orders)
    except Exception as error:  # noqa: BLE001  (recorded, and the attempt ends)
        write_failure(Path(folder), error)
        traceback.print_exc()
        return 1
    if is_rank:
        return run_rank(folder, run_id)
    remove_temporary_folder()  # if it is still there, nobody else does
    os._exit(0)  # libraries would print on their way out


def _serve(orders: socket.socket) -> bool:
    """Forks ranks as ordered. Returns True in each of them, and False when no more are needed.

    Raises:
        OSError: a process cannot be forked.
    """
    with orders, orders.makefile("rb") as lines:
        for line in lines:
            order = json.loads(line)
            for own in order["own"]:
                if _is_closed(orders):  # while the libraries were imported
                    return False
                if _fork_rank(orders):
                    os.environ.clear()
                    os.environ.update({**order["common"], **own})
                    tempfile.tempdir = None  # read from the environment again
                    return True
    return False


def _is_closed(orders: socket.socket) -> bool:
    """Whether the supervisor has closed its end, also if there are orders that were not read."""
    poll = select.poll()
    poll.register(orders, 0)
    return bool(poll.poll(0))


def _fork_rank(orders: socket.socket) -> bool:
    """Returns True in the rank; here, tells its process id to the supervisor, its parent by now.

    Raises:
        OSError: a process cannot be forked.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        os.waitpid(between, 0)
        rank = os.read(reading, 64)
        os.close(reading)
        if not rank:
            raise ChildProcessError("a rank could not be forked, or was killed at once")
        with suppress(BrokenPipeError):  # the supervisor is gone
            orders.sendall(rank)
        return False
    if os.fork():
        os._exit(0)
    os.close(reading)
    os.setsid()  # first: who knows the rank may kill its process group
    name_process(RANK_NAME)
    os.write(writing, f"{os.getpid()}\n".encode())
    os.close(writing)
    return True


def _close_input() -> None:
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)


if __name__ == "__main__":
    from rlx.launch.log_lines import stamp_output

    stamp_output()
    sys.exit(main(*sys.argv[1:]))
