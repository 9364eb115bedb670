"""An actor of Ray that runs one rank as its child, as `rlx.launch.node` does for a machine's.

The rank is a process of its own, so that Ray's threads and signal handlers are not its. It takes
the actor for its supervisor, and exits without it.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, TypedDict

import ray

from rlx.descendants import adopt_orphans, kill_descendants
from rlx.home import RunFolder
from rlx.launch.leftovers import open_temporary_folder
from rlx.launch.node import find_network_interface
from rlx.launch.ports import find_free_port
from rlx.launch.ray_folders import choose_working_folder, find_folder, write_start_files

__all__ = ["RankActor", "RankOrder", "RankPlace", "RankState"]

LOOK = 0.25
"""Longest time in seconds that a look waits for output."""
PATIENCE = 5.0
"""Seconds that the processes which a rank started have to exit after it."""
_CHUNK = 1 << 16


class RankPlace(NamedTuple):
    """Where an actor runs.

    Attributes:
        node: Ray's id of the node.
        host: its name.
        address: its IP address.
        port: a free one.
        gpus: of the actor, by the tokens of CUDA_VISIBLE_DEVICES.
        folder: where its rank would have the run's folder.
    """

    node: str
    host: str
    address: str
    port: int
    gpus: tuple[str, ...]
    folder: str


class RankOrder(TypedDict):
    """The rank that an actor is to start.

    Attributes:
        files: what its folder must hold, if its node does not see the run's.
    """

    folder: str
    files: dict[str, bytes]
    run_id: str
    cwd: str
    environment: dict[str, str]


class RankState(NamedTuple):
    """Whole lines that a rank has printed since the last look, and how it ended.

    Attributes:
        code: its exit code, below 0 after a signal; None while it runs.
        failure: what it wrote for the supervisor, which does not see its disk.
    """

    output: bytes
    code: int | None
    failure: bytes = b""


class RankActor:
    """Runs one rank.

    Args:
        folder: of the run.
        mark: a file in it; see `rlx.launch.ray_folders`.
    """

    def __init__(self, folder: str, mark: str) -> None:
        adopt_orphans()
        self._exit = ExitStack()
        self._temporary = self._exit.enter_context(open_temporary_folder(RunFolder(Path(folder))))
        self._run, self._mark = folder, mark
        self._failure: Path | None = None
        self._rest = b""
        self._is_stopped = False
        self._rank: subprocess.Popen[bytes] | None = None

    def find_place(self) -> RankPlace:
        """Where this actor runs."""
        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        address = ray.util.get_node_ip_address()
        folder = find_folder(self._run, self._mark, self._temporary["TMPDIR"])
        return RankPlace(
            context.get_node_id(), socket.gethostname(), address, find_free_port(), gpus, folder
        )

    def start(self, order: RankOrder) -> None:
        """Starts the rank."""
        if order["files"]:
            folder = RunFolder(Path(order["folder"]))
            write_start_files(folder.root, order["files"])
            self._failure = folder.failure
        own = {**os.environ, **order["environment"], **self._temporary}
        if interface := find_network_interface(own["MASTER_ADDR"]):
            own.setdefault("GLOO_SOCKET_IFNAME", interface)
        place = choose_working_folder(order["cwd"], self._temporary["TMPDIR"])
        if place != order["cwd"]:
            note = (
                f"{socket.gethostname()} has no folder {order['cwd']}: its ranks work in {place}\n"
            )
            self._rest = note.encode()  # of the run's log
        # Ray starts its processes with this signal blocked, which they would pass on.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._rank = subprocess.Popen(
            [sys.executable, "-m", "rlx.launch.rank", order["folder"], order["run_id"]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=place,
            env={**own, "RLX_SUPERVISOR": str(os.getpid())},
        )
        assert self._rank.stdout is not None
        os.set_blocking(self._rank.stdout.fileno(), False)

    def poll_rank(self, *, stop: bool) -> RankState:
        """Waits a moment for output or the end of the rank.

        Args:
            stop: tells the rank to end after its current step.
        """
        assert self._rank is not None and self._rank.stdout is not None
        if stop and not self._is_stopped:
            self._is_stopped = True
            self._rank.terminate()
        select.select([self._rank.stdout], [], [], LOOK)
        return self._read_output(self._rank.poll())

    def end(self) -> RankState:
        """Ends the rank, if it has not ended, with all that it started and its files."""
        if self._rank is None:  # a peer could not start
            self._exit.close()
            return RankState(b"", None)
        code = self._rank.poll()
        self._rank.kill()
        self._rank.wait()
        kill_descendants(PATIENCE if code is not None else 0.0)
        state = self._read_output(code)
        self._exit.close()
        return state

    def _read_output(self, code: int | None) -> RankState:
        assert self._rank is not None and self._rank.stdout is not None
        text = b""
        with suppress(BlockingIOError):  # there is no more now
            while code is not None or len(text) < _CHUNK:
                piece = os.read(self._rank.stdout.fileno(), _CHUNK)
                if not piece:
                    break
                text += piece
        text = self._rest + text
        end = len(text) if code is not None else text.rfind(b"\n") + 1
        self._rest = text[end:]
        failure = b""
        if code and self._failure is not None and self._failure.exists():
            failure = self._failure.read_bytes()
        return RankState(text[:end], code, failure)
