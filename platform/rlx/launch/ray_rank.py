"""An actor of Ray that runs one rank as its child.

The rank is a process of its own, so that Ray's threads and signal handlers are not its. It takes
the actor for its supervisor, and exits without it.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import ray

from rlx.descendants import adopt_orphans, kill_descendants
from rlx.home import RunFolder
from rlx.launch.processes import find_free_port, find_network_interface, open_temporary_folder

OUTPUT_WAIT = 0.25
"""Longest time in seconds that a poll waits for output."""
DESCENDANTS_GRACE = 5.0
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
        sees_run: whether the run's folder is there.
    """

    node: str
    host: str
    address: str
    port: int
    gpus: tuple[str, ...]
    sees_run: bool


class RankState(NamedTuple):
    """Whole lines that a rank has printed since the last poll, and its exit code once it ended."""

    output: bytes
    code: int | None


class RankActor:
    """Runs one rank of the run with this folder."""

    def __init__(self, folder: str) -> None:
        adopt_orphans()
        self._exit = ExitStack()
        self._folder = RunFolder(Path(folder))
        self._sees_run = self._folder.resolved_spec.exists()
        self._temporary = self._exit.enter_context(open_temporary_folder(self._folder))
        self._rest = b""
        self._is_stopped = False
        self._rank: subprocess.Popen[bytes] | None = None

    def find_place(self) -> RankPlace:
        """Where this actor runs."""
        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        address = ray.util.get_node_ip_address()
        node, host = context.get_node_id(), socket.gethostname()
        return RankPlace(node, host, address, find_free_port(), gpus, self._sees_run)

    def start(self, run_id: str, cwd: str, environment: Mapping[str, str]) -> None:
        """Starts the rank."""
        own = {**os.environ, **environment, **self._temporary, "RLX_SUPERVISOR": str(os.getpid())}
        if interface := find_network_interface(own["MASTER_ADDR"]):
            own.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Ray starts its processes with this signal blocked, which they would pass on.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._rank = subprocess.Popen(
            [sys.executable, "-m", "rlx.launch.rank", str(self._folder.root), run_id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd if Path(cwd).is_dir() else None,
            env=own,
        )
        assert self._rank.stdout is not None
        os.set_blocking(self._rank.stdout.fileno(), False)

    def poll_rank(self, *, stop: bool) -> RankState:
        """Waits a moment for output or the end of the rank.

        Args:
            stop: asks the rank to end after its current step.
        """
        assert self._rank is not None and self._rank.stdout is not None
        if stop and not self._is_stopped:
            self._is_stopped = True
            self._rank.terminate()
        select.select([self._rank.stdout], [], [], OUTPUT_WAIT)
        return self._read_output(self._rank.poll())

    def end(self) -> RankState:
        """Ends the rank, if it has not ended, with all that it started and its files."""
        state = RankState(b"", None)
        if self._rank is not None:  # else a peer could not start
            code = self._rank.poll()
            self._rank.kill()
            self._rank.wait()
            kill_descendants(DESCENDANTS_GRACE if code is not None else 0.0)
            state = self._read_output(code)
        self._exit.close()
        return state

    def _read_output(self, code: int | None) -> RankState:
        assert self._rank is not None and self._rank.stdout is not None
        text = self._rest
        with suppress(BlockingIOError):  # there is no more now
            while code is not None or len(text) < _CHUNK:
                piece = os.read(self._rank.stdout.fileno(), _CHUNK)
                if not piece:
                    break
                text += piece
        end = len(text) if code is not None else text.rfind(b"\n") + 1
        self._rest = text[end:]
        return RankState(text[:end], code)
