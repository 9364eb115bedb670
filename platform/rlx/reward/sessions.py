"""Worker processes that keep live sessions of environments until these are closed.

One process, the keeper, forks the workers, watches their deadlines and replaces those that are
lost. It runs no plugin. Sessions of a replayable environment share a few workers; any other session
has a worker of its own, so that a call that hangs or waits costs no other session.
"""

import multiprocessing
import pickle
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

from rlx.errors import EnvironmentFault
from rlx.reward.plugin_process import ChunkReport, ChunkWatch, JobProcess, start_worker

_CLOSING = 5.0
"""Seconds in which the workers may close their sessions when a run ends."""
_MAX_RESTARTS = 3
"""How often a keeper that was killed is replaced while it has calls."""


class WorkerOrder(NamedTuple):
    """A call for a worker.

    Attributes:
        worker: number of the worker, which is started if it is not there.
        call: number of the call.
        deadline: seconds that it may take.
        memory_mb: MiB of address space that it may add to the worker's; None for any.
        payload: the pickled job.
    """

    worker: int
    call: int
    deadline: float
    memory_mb: int | None
    payload: bytes


class WorkerAnswer(NamedTuple):
    """What became of a call.

    Attributes:
        call: its number.
        report: of the worker.
        seconds: that it took, imports not counted.
    """

    call: int
    report: ChunkReport
    seconds: float


@dataclass(slots=True)
class _Worker:
    """A worker of the keeper: its process, its calls, and how long the current one has taken."""

    process: JobProcess = field(default_factory=JobProcess)
    queue: deque[WorkerOrder] = field(default_factory=deque)
    watch: ChunkWatch | None = None

    def begin_next(self) -> ChunkReport | None:
        """Starts the next call; returns how the process died if it cannot take it."""
        if not self.queue:
            self.watch = None
            return None
        order = self.queue[0]
        self.watch = ChunkWatch((order.deadline,))
        try:
            self.process.send(pickle.dumps((order.payload, order.memory_mb, None)))
        except OSError:
            return self.process.report_death()
        return None

    def check_call(self, *, is_ready: bool) -> ChunkReport | None:
        """What became of the current call; None while it runs."""
        assert self.watch is not None
        return self.process.check_chunk(self.watch, {}, is_ready=is_ready)


def keep_workers(orders: Connection, answers: Connection) -> None:
    """Carries out orders until the other end is closed; then closes all sessions."""
    start_worker()
    workers: dict[int, _Worker] = {}
    try:
        while True:
            busy = {w.process.pipe: w for w in workers.values() if w.watch is not None}
            looks = [w.watch.interval for w in busy.values() if w.watch is not None]
            ready = wait([orders, *busy], min(looks, default=None))
            if orders in ready:
                order = WorkerOrder(*orders.recv())
                worker = workers.setdefault(order.worker, _Worker())
                worker.queue.append(order)
                if worker.watch is None:
                    _answer(answers, worker, worker.begin_next())
            for pipe, worker in busy.items():
                _answer(answers, worker, worker.check_call(is_ready=pipe in ready))
    except (EOFError, OSError):  # the run has ended, or was killed
        end = time.monotonic() + _CLOSING
        for worker in workers.values():
            worker.process.dismiss()
        for worker in workers.values():
            worker.process.end(end - time.monotonic())


def _answer(answers: Connection, worker: _Worker, report: ChunkReport | None) -> None:
    """Answers calls that are over, and begins those after them."""
    while report is not None:
        assert worker.watch is not None
        order, seconds = worker.queue.popleft(), worker.watch.spent.seconds
        answers.send(tuple(WorkerAnswer(order.call, report, seconds)))
        if report.is_spent:
            worker.process.end()
        report = worker.begin_next()


class SessionKeeper:
    """A keeper and the calls that it has; started by its first order.

    A thread reads its answers, so that neither side waits for the other to read.
    """

    def __init__(self) -> None:
        self._orders: dict[int, WorkerOrder] = {}
        self._process: SpawnProcess | None = None
        self._channel: Connection
        self._reader: Thread
        self._answers: SimpleQueue[WorkerAnswer | None]
        self._lost = 0

    def send(self, order: WorkerOrder) -> None:
        """Has a call carried out, after those of the same worker before it."""
        self._orders[order.call] = order
        self._deliver([order])

    def receive(self, seconds: float | None) -> list[WorkerAnswer]:
        """The answers that are there; waits at most so many seconds for the first.

        Raises:
            EnvironmentFault: the keeper was lost too often.
        """
        answers: list[WorkerAnswer] = []
        while self._orders and (not answers or not self._answers.empty()):
            try:
                answer = self._answers.get(timeout=seconds)
            except Empty:
                break
            if answer is None:
                self._restart()
            else:
                del self._orders[answer.call]
                answers.append(answer)
                self._lost = 0
        return answers

    def close(self) -> None:
        """Closes all sessions, and ends the keeper with all its workers."""
        self._orders.clear()
        if self._process is not None:
            self._channel.close()
            self._process.join()
            self._reader.join()
            self._process.close()
            self._process = None

    def _deliver(self, orders: Iterable[WorkerOrder]) -> None:
        if self._process is None:
            self._start()
        with suppress(OSError):  # it is gone, which is noticed where its answers are awaited
            for order in orders:
                self._channel.send(tuple(order))

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        theirs, self._channel = context.Pipe(duplex=False)
        answers, their_answers = context.Pipe(duplex=False)
        self._process = context.Process(
            target=keep_workers, args=(theirs, their_answers), name="rlx-sessions", daemon=True
        )
        self._process.start()
        theirs.close()
        their_answers.close()
        self._answers = SimpleQueue()
        self._reader = Thread(
            target=_read_answers, args=(answers, self._answers), name="rlx-sessions", daemon=True
        )
        self._reader.start()

    def _restart(self) -> None:
        """Starts the keeper again and repeats the calls that have no answer."""
        orders = dict(self._orders)
        self.close()
        self._lost += 1
        if self._lost > _MAX_RESTARTS:
            raise EnvironmentFault(
                "the process that keeps the sessions of environments is lost again and again; is "
                "there enough memory?"
            )
        self._orders = orders
        self._deliver(orders.values())


def _read_answers(channel: Connection, answers: "SimpleQueue[WorkerAnswer | None]") -> None:
    """Passes answers on; None once the keeper is gone."""
    with channel, suppress(EOFError, OSError):
        while True:
            answers.put(WorkerAnswer(*channel.recv()))
    answers.put(None)
