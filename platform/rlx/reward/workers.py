"""Runs rewards and environments in worker processes of this machine.

Workers import what the rewards import, and rlx imports no torch in them.
"""

import multiprocessing
import pickle
import sys
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future, InvalidStateError, wait
from contextlib import suppress
from weakref import WeakSet

from pebble import ProcessExpired, ProcessPool
from pebble.common import CONSTS

from rlx.errors import EnvironmentFault
from rlx.reward.job import JobOutcome, RewardJob, Work
from rlx.reward.pool import LOOK, JobPool
from rlx.reward.worker import ChunkReport, run_chunk, start_worker

__all__ = ["ChunkWorkers", "JobOutcome", "RewardJob", "RewardPool"]

CONSTS.term_timeout = 60.0
"""Seconds in which a worker that is told to end may kill what its plugins started; the library's 3
are too few on a busy machine."""

_RENEW_AFTER = 1000  # chunks; limits the damage of a scorer with a slow memory leak
_MAX_RESTARTS = 3


class ChunkWorkers:
    """Worker processes that run chunks of jobs.

    Args:
        count: number of processes.
        memory_mb: MiB of address space that a job may add to its worker's.
        grace: seconds for the import of a plugin in a fresh worker, in addition to two deadlines.

    Raises:
        EnvironmentFault: they do not start.
    """

    def __init__(self, count: int, memory_mb: int, grace: float) -> None:
        self._memory_mb, self._grace = memory_mb, grace
        self._pool = ProcessPool(
            max_workers=count,
            max_tasks=_RENEW_AFTER,
            initializer=start_worker,
            context=multiprocessing.get_context("spawn"),
        )
        self._sent = WeakSet[Future[ChunkReport]]()
        try:
            fault = self.run(pickle.dumps([]), ()).fault  # after the start of an interpreter
        except (BrokenExecutor, ProcessExpired, OSError) as error:
            fault = f"{error}{_explain_script()}"
        if fault is not None:
            self.close()
            raise EnvironmentFault(f"reward workers cannot start: {fault}")

    @property
    def is_active(self) -> bool:
        """Whether chunks can be sent; not if workers kept dying while idle."""
        return bool(self._pool.active)

    def send(self, payload: bytes, deadlines: tuple[float, ...]) -> "Future[ChunkReport]":
        """Has a chunk of pickled jobs run, each with its deadline in seconds."""
        # Without a timeout of the pool's own, which would count by the wall clock.
        arguments = (payload, deadlines, self._memory_mb, self._grace)
        report: Future[ChunkReport] = self._pool.schedule(run_chunk, args=arguments)
        self._sent.add(report)
        return report

    def run(self, payload: bytes, deadlines: tuple[float, ...]) -> ChunkReport:
        """Runs a chunk, as `send` does, and waits for what becomes of it."""
        report = self.send(payload, deadlines)
        while not wait([report], LOOK).done:
            self.end_forgotten()
        return report.result()

    def end_forgotten(self) -> None:
        """Ends the chunks that will never be answered, once the workers have ended.

        The library forgets a chunk that is sent while the last worker dies idle.
        """
        if self.is_active:
            return
        self.close()
        for report in list(self._sent):
            with suppress(InvalidStateError):  # it has been answered
                report.set_exception(BrokenExecutor("all workers have ended"))

    def close(self) -> None:
        """Ends the workers at once, even during a job, and all that their plugins started."""
        self._pool.stop()
        self._pool.join()


class RewardPool(JobPool):
    """A pool of worker processes for scoring; a context manager.

    Args:
        workers: number of processes.
        memory_mb: MiB of address space that a job may add to its worker's.
        grace: seconds for the import of a plugin in a fresh worker, in addition to two deadlines.

    Raises:
        EnvironmentFault: the workers do not start.
    """

    def __init__(self, workers: int, memory_mb: int, *, grace: float = 60.0) -> None:
        if workers < 1 or memory_mb < 1:
            raise ValueError(f"needs at least 1 worker and 1 MiB, got {workers} and {memory_mb}")
        super().__init__(workers)
        self._settings = workers, memory_mb, grace
        self._workers, self._restarts = ChunkWorkers(*self._settings), 0

    def close(self) -> None:
        """Ends the workers at once, even during a job, and all that their plugins started."""
        self._workers.close()

    def score(self, jobs: Sequence[Work]) -> list[JobOutcome]:
        self._restarts = 0
        return super().score(jobs)

    def _send(self, payload: bytes, deadlines: tuple[float, ...]) -> "Future[ChunkReport]":
        try:
            return self._workers.send(payload, deadlines)
        except RuntimeError as error:  # they have just ended, and are started again
            lost: Future[ChunkReport] = Future()
            lost.set_exception(BrokenExecutor(str(error)))
            return lost

    def _end_forgotten(self) -> None:
        self._workers.end_forgotten()

    def _require_workers(self) -> None:
        if self._workers.is_active:
            return
        self._restarts += 1
        self.close()
        if self._restarts > _MAX_RESTARTS:
            raise EnvironmentFault("reward workers keep dying while idle")
        self._workers = ChunkWorkers(*self._settings)


def _explain_script() -> str:
    """A hint for scripts, which workers import: they must not start workers themselves."""
    main = sys.modules["__main__"]
    if main.__spec__ is None and str(getattr(main, "__file__", "")).endswith(".py"):
        return '; in a script, call rlx below `if __name__ == "__main__":`'
    return ""
