"""Has workers run rewards and environments, so that a failure costs only its own verdict.

Jobs travel in chunks, because most take microseconds. If a worker hangs, dies or cannot read its
chunk, the chunk is run again one job at a time, so that only the culprit fails.
"""

import math
import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from types import TracebackType
from typing import Any, Self

from pebble import ProcessExpired

from rlx.reward.job import JobOutcome, Work, describe_error
from rlx.reward.worker import ChunkReport

__all__ = ["LOOK", "JobPool", "describe_worker_error"]

_CHUNK = 64
LOOK = 1.0
"""Seconds between two looks at workers that answer nothing."""
_AHEAD = 2
"""Chunks that are sent to each worker at once, so that it need not wait for the next one."""

_Positions = tuple[int, ...]


class JobPool(ABC):
    """Workers that run jobs; a context manager.

    Args:
        width: number of chunks that run at the same time.
    """

    def __init__(self, width: int) -> None:
        self._width = width

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Takes leave of the workers."""

    @abstractmethod
    def _send(self, payload: bytes, deadlines: tuple[float, ...]) -> "Future[ChunkReport]":
        """Has a chunk of pickled jobs run by a worker."""

    @abstractmethod
    def _require_workers(self) -> None:
        """Called before chunks are sent.

        Raises:
            EnvironmentFault: there are no workers.
        """

    @abstractmethod
    def _end_forgotten(self) -> None:
        """Called while nothing is answered: ends the chunks that no worker will ever answer."""

    def score(self, jobs: Sequence[Work]) -> list[JobOutcome]:
        """Runs the jobs and returns their outcomes in order. No plugin can make it raise.

        Raises:
            EnvironmentFault: the workers die repeatedly while idle.
        """
        outcomes: dict[int, JobOutcome] = {}
        queue = deque(self._cut_chunks(len(jobs)))
        running: dict[Any, _Positions] = {}
        while queue or running:
            self._require_workers()
            while queue and len(running) < _AHEAD * self._width:
                positions = queue.popleft()
                chunk = [jobs[position] for position in positions]
                try:
                    payload = pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL)
                except Exception as error:  # noqa: BLE001  (pickling runs the plugin's code)
                    fault = f"cannot be sent to a worker: {describe_error(error)}"
                    queue.extend(_isolate_fault(positions, fault, outcomes))
                else:
                    running[self._send(payload, tuple(job.deadline for job in chunk))] = positions
            for future in self._wait_for_some(running):
                positions = running.pop(future)
                queue.extend(_collect_outcomes(future, positions, jobs, outcomes))
        return [outcomes[position] for position in range(len(jobs))]

    def _wait_for_some(self, running: Collection[Any]) -> Collection[Any]:
        """Waits until some of the running chunks have ended; returns them, or none if none run."""
        while running:
            if done := wait(running, LOOK, FIRST_COMPLETED).done:
                return done
            self._end_forgotten()
        return ()

    def _cut_chunks(self, count: int) -> Iterable[_Positions]:
        size = max(1, min(_CHUNK, math.ceil(count / self._width)))
        return (tuple(range(i, min(i + size, count))) for i in range(0, count, size))


def _collect_outcomes(
    future: Any, positions: _Positions, jobs: Sequence[Work], outcomes: dict[int, JobOutcome]
) -> Iterable[_Positions]:
    """Records the outcomes of a chunk and returns the jobs that must run, or run again."""
    error = future.exception()
    if isinstance(error, BrokenExecutor):
        return [positions]
    if error is not None:
        return _isolate_fault(positions, describe_worker_error(error), outcomes)
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


def describe_worker_error(error: BaseException) -> str:
    """Says how a worker process was lost during a chunk."""
    if isinstance(error, ProcessExpired):
        how = f"signal {-error.exitcode}" if error.exitcode < 0 else f"exit code {error.exitcode}"
        return f"process died ({how})"
    return f"cannot be run by a worker: {describe_error(error)}"
