"""Rewards run in worker processes: whatever a scorer does costs its own verdict and no more.

Jobs travel in chunks, since most take microseconds. A worker stops early in a chunk that takes
long and hands back the rest. A chunk whose worker hangs, dies or runs out of memory is run again
one job at a time, so that only the culprit is lost. Workers never import torch.
"""

import math
import multiprocessing
import numbers
import os
import pickle
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from rlx.plugin import RewardPlugin, Sample, Score

__all__ = ["Job", "Outcome", "RewardPool"]


@dataclass(frozen=True, slots=True)
class Job:
    """One call of one reward.

    Attributes:
        reward: the plugin; its class must be importable in a fresh process.
        samples: one sample for scope "sample", all that are judged together for wider scopes.
        deadline: wall-clock seconds the call may take.
    """

    reward: RewardPlugin
    samples: tuple[Sample, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job: verdicts, or the scorer's fault.

    Attributes:
        verdicts: one per sample, in order; None where the reward abstained.
        fault: why there are no verdicts; None when there are.
    """

    verdicts: tuple[Score | None, ...] = ()
    fault: str | None = None


class _Chunk(NamedTuple):
    """Jobs that travel together, by their positions; the first `alone` of them by itself."""

    positions: tuple[int, ...]


class RewardPool:
    """Worker processes that score; use it as a context manager, or call `close`.

    Args:
        workers: number of processes, at least 1.
        memory_mb: MiB of address space that a job may take beyond what its worker already has.
        grace: seconds beyond its deadline before a silent worker is killed; it covers the import
            of the plugin in a fresh worker.
    """

    CHUNK = 64

    def __init__(self, workers: int, memory_mb: int, *, grace: float = 2.0) -> None:
        if workers < 1 or memory_mb < 1:
            raise ValueError(f"needs at least one worker and one MiB, got {workers}, {memory_mb}")
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
        """Ends the workers, whatever they are doing."""
        self._pool.stop()
        self._pool.join()

    def score(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Runs the jobs and returns what came of each, in order; never raises for a scorer."""
        outcomes: dict[int, Outcome] = {}
        queue = deque(self._cut(range(len(jobs))))
        running: dict[ProcessFuture[list[Outcome]], tuple[int, ...]] = {}
        while queue or running:
            while queue:
                positions = queue.popleft()
                try:
                    future = self._send([jobs[position] for position in positions])
                except _Unsendable as error:
                    self._part(positions, str(error), queue, outcomes)
                else:
                    running[future] = positions
