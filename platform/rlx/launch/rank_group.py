"""The ranks of an attempt: forks of one process, or processes of a launcher's command."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

from rlx.home import RunFolder

__all__ = ["CommandRanks", "ForkServer", "ForkedRanks", "RankGroup"]

LOOK = 0.05
"""Seconds between two looks at forked ranks."""


class RankGroup(ABC):
    """The processes that an attempt has started; each leads a session and process group."""

    @property
    @abstractmethod
    def is_direct(self) -> bool:
        """Whether `poll` tells how a rank has ended, and not how its launcher has."""

    @property
    @abstractmethod
    def pids(self) -> Sequence[int]:
        """Processes that are ranks, or have started them; whether they live or not."""

    @abstractmethod
    def poll(self) -> int | None:
        """Exit code: of the first rank that failed, 0 once all have ended, None before that."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether one of the processes has not ended."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Waits for the ranks to end or for one to fail, but not longer than this."""

    @abstractmethod
    def terminate(self) -> None:
        """Sends SIGTERM to the processes, but not to what they started."""

    def kill(self) -> None:
        """Kills the process groups."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    @abstractmethod
    def collect(self) -> None:
        """Waits for killed processes to end."""


class CommandRanks(RankGroup):
    """What a launcher's command starts: a rank, or the launcher of ranks."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, is_rank: bool
    ) -> None:
        self._is_rank = is_rank
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )

    @property
    def is_direct(self) -> bool:
        return self._is_rank

    @property
    def pids(self) -> Sequence[int]:
        return (self._process.pid,)

    def poll(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.poll() is None

    def wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def terminate(self) -> None:
        self._process.terminate()

    def collect(self) -> None:
        self._process.wait()


class ForkServer:
    """Starts ranks of a run on the CPU by forks of `rlx.launch.fork_server`, which it keeps.

    The first ranks wait for the imports of that process, and later ones import nothing. Ranks do
    not depend on it: if it is killed, the next ones get a new one.
    """

    def __init__(self, folder: RunFolder, run_id: str) -> None:
        self._command = [sys.executable, "-m", "rlx.launch.fork_server", str(folder.root), run_id]
        self._server: _Forker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def pid(self) -> int | None:
        """Process id, once ranks have been started."""
        return None if self._server is None else self._server.process.pid

    def start(self, common: Mapping[str, str], own: Iterable[Mapping[str, str]]) -> "ForkedRanks":
        """Starts a rank for each of `own`: its environment in addition to the `common` one."""
        if self._server is None or self._server.process.poll() is not None:
            self._end()
            self._server = self._start_server(common)
        return ForkedRanks(self._server, common, list(own))

    def _start_server(self, environment: Mapping[str, str]) -> "_Forker":
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                self._command, stdin=theirs.fileno(), start_new_session=True, env=environment
            )
        return _Forker(process, ours)

    def _end(self) -> None:
        if self._server is not None:
            self._server.orders.close()
            self._server.process.kill()
            self._server.process.wait()
            self._server = None


class _Forker(NamedTuple):
    """The process that forks, and the socket through which it is told."""

    process: "subprocess.Popen[bytes]"
    orders: socket.socket


class ForkedRanks(RankGroup):
    """Ranks that are children of this process, which adopts orphans.

    Args:
        server: forks them, and has not been asked for others that it still has to fork.
        common: environment variables that they have in common.
        own: those of each rank in addition.
    """

    def __init__(
        self, server: _Forker, common: Mapping[str, str], own: Sequence[Mapping[str, str]]
    ) -> None:
        self._server, self._missing = server, len(own)
        self._codes: dict[int, int | None] = {}
        self._failure: int | None = None
        self._answer = b""
        # Once: what does not fit into the socket would wait for the imports of the server.
        order = {"common": dict(common), "own": [dict(one) for one in own]}
        with suppress(ConnectionError):  # it has ended, which `poll` reports
            server.orders.sendall(json.dumps(order).encode() + b"\n")

    @property
    def is_direct(self) -> bool:
        return not self._missing

    @property
    def pids(self) -> Sequence[int]:
        return tuple(self._codes)

    def poll(self) -> int | None:
        self._update_codes()
        return self._failure if self._failure or self._is_alive() else 0

    def is_alive(self) -> bool:
        self._update_codes()
        return self._is_alive()

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(LOOK)

    def terminate(self) -> None:
        self._update_codes()
        for pid in [pid for pid, code in self._codes.items() if code is None]:
            os.kill(pid, signal.SIGTERM)
        if self._missing:
            self._server.process.terminate()

    def kill(self) -> None:
        if self._missing:  # it must not fork them later
            self._server.process.kill()
            self._server.process.wait()
        super().kill()

    def collect(self) -> None:
        while None in self._codes.values():
            self._update_codes()
            time.sleep(LOOK)

    def _is_alive(self) -> bool:
        is_forking = self._missing and self._server.process.poll() is None
        return bool(is_forking) or None in self._codes.values()

    def _update_codes(self) -> None:
        """Takes note of the ranks that have been forked, and of those that have ended."""
        server_code = self._server.process.poll()  # before its last answers are read
        self._take_answers()
        codes = []
        for pid in [pid for pid, code in self._codes.items() if code is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._codes[pid] = os.waitstatus_to_exitcode(status)
                codes.append(self._codes[pid])
        if self._missing and server_code is not None:
            codes.append(server_code or 1)
        # Of several, a signal is the cause: the peers of a killed rank fail.
        self._failure = self._failure or min(filter(None, codes), default=None)

    def _take_answers(self) -> None:
        with suppress(BlockingIOError, ConnectionError):
            self._answer += self._server.orders.recv(4096, socket.MSG_DONTWAIT)
        *lines, self._answer = self._answer.split(b"\n")
        for line in lines:
            self._codes[int(line)] = None
            self._missing -= 1
