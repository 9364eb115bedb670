"""What a worker process does: it keeps a child process that calls the plugins.

The child may hang, die or start processes of its own. The worker runs no plugin, so it survives to
end the child with everything below it: when a deadline passes, when the child dies, and when the
worker itself has to end because its pool is closed or the pool's process is gone.
"""

import mmap
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, NoReturn

from rlx.descendants import adopt_orphans, die_with_parent, kill_descendants, reap_orphans
from rlx.reward.job import describe_error, run_jobs
from rlx.stopwatch import Stopwatch

_DEADLINE_CHECK_INTERVAL = 0.05
"""Longest time between two looks at the child, in seconds."""
_IMPORT_SECONDS = 60.0
"""Time for the import of plugins in a fresh child, in addition to two deadlines."""
_COUNTER = struct.Struct("q")


class ChunkReport(NamedTuple):
    """What became of a chunk of jobs.

    Attributes:
        outcomes: the pickled outcomes of the jobs that ran.
        fault: why there are none; None if they ran.
        killing_signal: the signal that killed the process, if that is the fault.
        cpu_seconds: that the process used to run them.
    """

    outcomes: bytes = b""
    fault: str | None = None
    killing_signal: int | None = None
    cpu_seconds: float = 0.0


class _JobProcess:
    """The child process that runs jobs; starts a new one in place of one that has ended."""

    def __init__(self) -> None:
        self._started = mmap.mmap(-1, _COUNTER.size)
        """Number of jobs that the children have started, written by them."""
        self._before = 0
        self._pid: int | None = None
        self._own_pid = 0
        """In the child: its process id, which a copy of it that a plugin forked does not have."""
        self._pipe: Connection

    def send(self, chunk: bytes) -> None:
        """Sends pickled jobs to the child, after starting it if there is none.

        The count of started jobs is read before: the child is fast, and this process may be slow.

        Raises:
            OSError: the child has just died.
        """
        if self._pid is not None and self._has_ended():
            self.end()
        if self._pid is None:
            self._start()
        self._before = self._count_started()
        self._pipe.send_bytes(chunk)

    def await_report(self, deadlines: Sequence[float]) -> ChunkReport:
        """Waits for the outcomes of a chunk.

        Only the time that this process has seen pass counts against a deadline, because a pause
        of the whole machine, container or job is no fault of a plugin.
        """
        rank = multiprocessing.parent_process()
        assert rank is not None
        look = min(_DEADLINE_CHECK_INTERVAL, min(deadlines, default=_DEADLINE_CHECK_INTERVAL) / 4)
        current, spent = 0, Stopwatch(2 * look)
        while not (ready := wait([self._pipe, rank.sentinel], look)) and not self._has_ended():
            before, current = current, self._count_started() - self._before
            if current != before:
                spent.restart()
            # Until the first job starts, the child imports the plugins.
            begin = 2 * max(deadlines, default=0.0) + _IMPORT_SECONDS
            limit = deadlines[current - 1] if current else begin
            if spent.look() > limit:
                self.end()
                if not deadlines:  # as of the chunk by which a worker shows that it has started
                    return ChunkReport(fault=f"no process has begun within {limit:g} s")
                return ChunkReport(fault=f"deadline of {deadlines[max(current - 1, 0)]:g} s passed")
        if rank.sentinel in ready:
            self.end()
            os._exit(1)
        try:
            if not self._pipe.poll():
                return self.report_death()
            report: ChunkReport = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return self.report_death()
        reap_orphans(self._pid or 0)
        return report

    def report_death(self) -> ChunkReport:
        """Ends what the dead child has left behind, and says how it died."""
        code = self.end()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ChunkReport(
            fault=f"process died ({how})", killing_signal=-code if code < 0 else None
        )

    def end(self) -> int:
        """Ends the child and everything that it started; returns its exit code."""
        pid, code = self._pid, 0
        if pid is not None:
            if not self._has_ended():
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._pid = None
            self._pipe.close()
        kill_descendants()
        return code

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if not pid:
            self._pipe.close()
            self._serve(theirs)
        theirs.close()
        self._pid = pid

    def _serve(self, pipe: Connection) -> NoReturn:
        """Runs chunks in the child until the worker closes the pipe."""
        try:
            self._own_pid = os.getpid()
            die_with_parent()
            os.register_at_fork(after_in_child=pipe.close)  # its end must be that of this process
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            while True:
                payload, memory_mb = pickle.loads(pipe.recv_bytes())
                pipe.send_bytes(pickle.dumps(self._run_jobs(payload, memory_mb)))
        except (EOFError, OSError):
            os._exit(0)
        finally:
            os._exit(1)

    def _run_jobs(self, payload: bytes, memory_mb: int) -> ChunkReport:
        began = time.process_time()
        try:
            outcomes = run_jobs(payload, memory_mb, self._count_job)
        except Exception as error:  # noqa: BLE001  (unpickling imports plugins, which may raise)
            return ChunkReport(fault=f"cannot be read by a worker: {describe_error(error)}")
        pickled = pickle.dumps(outcomes, pickle.HIGHEST_PROTOCOL)
        return ChunkReport(pickled, cpu_seconds=time.process_time() - began)

    def _count_job(self) -> None:
        if os.getpid() != self._own_pid:  # a plugin forked, and its copy did not end
            os._exit(0)
        _COUNTER.pack_into(self._started, 0, self._count_started() + 1)

    def _count_started(self) -> int:
        (count,) = _COUNTER.unpack_from(self._started)
        return int(count)

    def _has_ended(self) -> bool:
        """Whether the child has ended; its exit code can still be read."""
        assert self._pid is not None
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


_jobs = _JobProcess()


def start_worker() -> None:
    """Prepares a worker process: it ends what it started, and its prints go to stderr.

    The worker leaves its parent's session, because torchrun ends a rank by a signal to the whole
    process group while the rank still scores its current step.
    """
    os.setsid()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    multiprocessing.util.Finalize(None, _jobs.end, exitpriority=0)
    os.dup2(sys.__stderr__.fileno() if sys.__stderr__ else 2, 1)


def _leave() -> NoReturn:
    try:
        with suppress(ChildProcessError):  # it was being ended when the signal came
            _jobs.end()
        kill_descendants()
    finally:
        os._exit(128 + signal.SIGTERM)


def run_chunk(payload: bytes, deadlines: Sequence[float], memory_mb: int) -> ChunkReport:
    """Runs a chunk of pickled jobs in this worker's child.

    Args:
        payload: the pickled jobs.
        deadlines: the deadline of each, in seconds.
        memory_mb: MiB of address space that they may add to the child's.
    """
    try:
        _jobs.send(pickle.dumps((payload, memory_mb)))
    except OSError:
        return _jobs.report_death()
    try:
        return _jobs.await_report(deadlines)
    except BaseException:
        _jobs.end()  # or its late report would be taken for that of the next chunk
        raise
