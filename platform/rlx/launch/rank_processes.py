"""The processes that the supervisor starts for an attempt, and how it talks to a launcher of ranks.

A launcher such as srun or the driver of Ray may have its ranks on other machines, which signals of
this one do not reach. It therefore reads its standard input: a line `STOP` asks the ranks to write
a checkpoint and exit, and the end of the input, which the death of the supervisor brings about too,
ends them at once.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

__all__ = ["STOP", "LauncherInput", "RankProcesses", "StartCommand"]

STOP = b"stop\n"
POLL_INTERVAL = 0.05
"""Seconds between two polls of several processes."""
LAUNCHER_GRACE = 30.0
"""Seconds that a launcher has to end its ranks on all machines once its input has ended."""


class StartCommand(NamedTuple):
    """A command that starts a rank, or the launcher of all ranks.

    Attributes:
        command: program and arguments.
        environment: variables in addition to those that all ranks have in common.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = {}


class RankProcesses:
    """The ranks of an attempt, or the one launcher of all of them; each leads a process group.

    Args:
        commands: what to start.
        common: environment of all of them.
        are_ranks: whether each command is a rank, so that its exit code is the rank's.
        reads_input: whether the command is a launcher that reads its input, see this module.
    """

    def __init__(
        self,
        commands: Sequence[StartCommand],
        common: Mapping[str, str],
        *,
        are_ranks: bool,
        reads_input: bool = False,
    ) -> None:
        self.are_ranks, self._reads_input = are_ranks, reads_input
        self._failure: int | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, own in commands:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE if reads_input else subprocess.DEVNULL,
                        start_new_session=True,
                        env={**common, **own},
                    )
                )
        except OSError:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes, whether they live or not."""
        return tuple(process.pid for process in self._processes)

    def poll(self) -> int | None:
        """Exit code: of the first process that failed, 0 once all have ended, None before that."""
        codes = [process.poll() for process in self._processes]
        # Of several, a signal is the cause: the peers of a killed rank fail.
        self._failure = self._failure or min(filter(None, codes), default=None)
        return self._failure or (None if None in codes else 0)

    def is_alive(self) -> bool:
        """Whether one of the processes has not ended."""
        return any(process.poll() is None for process in self._processes)

    def wait(self, seconds: float) -> None:
        """Waits until all have ended or one has failed, but not longer than this."""
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(POLL_INTERVAL)

    def stop(self) -> None:
        """Asks the ranks to write a checkpoint and exit."""
        for process in self._processes:
            if process.stdin is None:
                process.terminate()
            else:
                with suppress(BrokenPipeError):  # it has ended
                    process.stdin.write(STOP)
                    process.stdin.flush()

    def kill(self) -> None:
        """Ends the processes, and waits for them; a launcher ends its ranks elsewhere first."""
        for process in self._processes:
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LAUNCHER_GRACE)
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()


class LauncherInput:
    """The standard input of a launcher, which the supervisor writes.

    Attributes:
        stop: the ranks should write a checkpoint and exit.
        is_closed: the ranks should end at once; the supervisor may be gone.
    """

    def __init__(self) -> None:
        self.stop = self.is_closed = False

    def look(self, seconds: float = 0.0) -> None:
        """Takes note of what has arrived; waits for it up to this long."""
        if self.is_closed:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            received = os.read(0, 4096)
            self.is_closed = not received
            self.stop |= STOP in received
