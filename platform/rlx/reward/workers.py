"""Runs rewards and environments in worker processes, so that a failure costs only its own verdict.

Jobs travel in chunks, because most take microseconds. If a worker hangs, dies or cannot read its
chunk, the chunk is run again one job at a time, so that only the culprit fails. Workers import
what the rewards import, and rlx imports no torch in them.
"""

import math
import multiprocessing
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, wait
from types import TracebackType
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool
from pebble.common import CONSTS

from rlx.errors import EnvironmentFault
from rlx.reward.job import JobOutcome, RewardJob, Work, describe_error
from rlx.reward.worker import ChunkReport, run_chunk, start_worker

__all__ = ["JobOutcome", "RewardJob", "RewardPool"]

CONSTS.term_timeout = 60.0
"""Seconds in which a worker that is told to end may kill what its plugins started; the library's 3
are too few on a busy machine."""

_CHUNK = 64
_RENEW_AFTER = 1000  # chunks; limits the damage of a scorer with a slow memory leak
_MAX_RESTARTS = 3

_Positions = tuple[int, ...]


class RewardPool:
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
        self._workers, self._memory_mb, self._grace = workers, memory_mb, grace
        self._pool = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers at once, even during a job, and all that their plugins started."""
        self._pool.stop()
        self._pool.join()

    def score(self, jobs: Sequence[Work]) -> list[JobOutcome]:
        """Runs the jobs and returns their outcomes in order. No plugin can make it raise.

        Raises:
            EnvironmentFault: the workers die repeatedly while idle.
        """
        outcomes: dict[int, JobOutcome] = {}
        queue = deque(self._chunks(len(jobs)))
        running: dict[Any, _Positions] = {}
        restarts = 0
        while queue or running:
            if not self._pool.active:
                restarts += 1
                self._restart(restarts)
            while queue:
                positions = queue.popleft()
                try:
                    running[self._send([jobs[position] for position in positions])] = positions
                except Exception as error:  # noqa: BLE001  (pickling runs the plugin's code)
                    fault = f"cannot be sent to a worker: {describe_error(error)}"
                    queue.extend(_isolate_fault(positions, fault, outcomes))
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                queue.extend(_collect_outcomes(future, running.pop(future), jobs, outcomes))
        return [outcomes[position] for position in range(len(jobs))]

    def _chunks(self, count: int) -> Iterable[_Positions]:
        size = max(1, min(_CHUNK, math.ceil(count / self._workers)))
        return (tuple(range(i, min(i + size, count))) for i in range(0, count, size))

    def _send(self, chunk: list[Work]) -> Any:
        payload = pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL)
        deadlines = tuple(job.deadline for job in chunk)
        # Without a timeout of the pool's own, which would count by the wall clock.
        return self._pool.schedule(
            run_chunk, args=(payload, deadlines, self._memory_mb, self._grace)
        )

    def _start(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._workers,
            max_tasks=_RENEW_AFTER,
            initializer=start_worker,
            context=multiprocessing.get_context("spawn"),
        )
        # The first completed task includes the start of an interpreter.
        first = [
            pool.schedule(run_chunk, args=(pickle.dumps([]), (), self._memory_mb, self._grace))
        ]
        try:
            wait(first)
            first[0].result()
        except (BrokenExecutor, ProcessExpired, OSError) as error:
            pool.stop()
            pool.join()
            raise EnvironmentFault(
                f"reward workers cannot start: {error}{_explain_script()}"
            ) from error
        return pool

    def _restart(self, restarts: int) -> None:
        self.close()
        if restarts > _MAX_RESTARTS:
            raise EnvironmentFault("reward workers keep dying while idle")
        self._pool = self._start()


def _collect_outcomes(
    future: Any, positions: _Positions, jobs: Sequence[Work], outcomes: dict[int, JobOutcome]
) -> Iterable[_Positions]:
    """Records the outcomes of a chunk and returns the jobs that must run, or run again."""
    error = future.exception()
    if isinstance(error, BrokenExecutor):
        return [positions]
    if error is not None:
        return _isolate_fault(positions, _describe_worker_error(error), outcomes)
    report: ChunkReport = future.result()
    if report.fault is not None:
        return _isolate_fault(positions, report.fault, outcomes)
    try:
        done: list[JobOutcome] = pickle.loads(report.outcomes)
    except Exception as raised:  # noqa: BLE001  (unpickling a state runs the plugin's code)
        fault = f"gave what cannot be read: {describe_error(raised)}"
        return _isolate_fault(positions, fault, outcomes)
    outcomes.update(zip(positions, done, strict=False))
    rest = positions[len(done) :]
    return [rest] if rest else []


def _isolate_fault(
    positions: _Positions, fault: str, outcomes: dict[int, JobOutcome]
) -> Iterable[_Positions]:
    """Records the fault of a single job; jobs that failed together are returned to run alone."""
    if len(positions) == 1:
        outcomes[positions[0]] = JobOutcome(fault=fault)
        return ()
    return [(position,) for position in positions]


def _describe_worker_error(error: BaseException) -> str:
    if isinstance(error, ProcessExpired):
        how = f"signal {-error.exitcode}" if error.exitcode < 0 else f"exit code {error.exitcode}"
        return f"process died ({how})"
    return f"cannot be run by a worker: {describe_error(error)}"


def _explain_script() -> str:
    """A hint for scripts, which workers import: they must not start workers themselves."""
    main = sys.modules["__main__"]
    if main.__spec__ is None and str(getattr(main, "__file__", "")).endswith(".py"):
        return '; in a script, call rlx below `if __name__ == "__main__":`'
    return ""
