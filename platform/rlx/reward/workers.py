"""Worker processes that run chunks of calls, and keep live sessions until these are closed.

One process, the keeper, forks the workers, watches their deadlines and replaces those that are
lost. It runs no plugin.
"""

import multiprocessing
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

from rlx.errors import EnvironmentFault
from rlx.reward.plugin_process import ChunkReport, JobProcess, start_worker

MAX_RESTARTS = 3
"""How often processes that something killed are started again in a row."""


class WorkerOrder(NamedTuple):
    """A chunk of calls for a worker, which is started if it is not there.

    Attributes:
        call: number of the order.
        deadlines: seconds that each call may take.
        payload: the pickled calls.
        memory_mb: MiB of address space that they may add to the worker's; None for any.
        answers: the file that keeps what rewards recall.
        is_concurrent: whether the calls run beside each other.
    """

    worker: int
    call: int
    deadlines: tuple[float, ...]
    payload: bytes
    memory_mb: int | None
    answers: Path | None = None
    is_concurrent: bool = False


class WorkerAnswer(NamedTuple):
    """What became of an order; `seconds` are those of its last call, imports not counted."""

    call: int
    report: ChunkReport
    seconds: float


@dataclass(slots=True)
class _Worker:
    """A worker's process, and its orders, of which it carries out the first."""

    process: JobProcess = field(default_factory=JobProcess)
    queue: deque[WorkerOrder] = field(default_factory=deque)

    def begin_next(self) -> ChunkReport | None:
        """Starts the next order; returns how the process died if it cannot take it."""
        if not self.queue:
            return None
        order = self.queue[0]
        chunk = pickle.dumps((order.payload, order.memory_mb, order.answers))
        try:
            self.process.begin(chunk, order.deadlines, is_concurrent=order.is_concurrent)
        except OSError:
            return self.process.report_death()
        return None


def keep_workers(orders: Connection, answers: Connection, closing_seconds: float) -> None:
    """Carries out orders until the other end is closed; then closes all sessions."""
    start_worker()
    JobProcess.closed_in_children = (orders, answers)
    workers: dict[int, _Worker] = {}
    try:
        while True:
            busy = {w.process.pipe: w for w in workers.values() if w.queue}
            looks = [w.process.watch.interval for w in busy.values()]
            ready = wait([orders, *busy], min(looks, default=None))
            if orders in ready:
                order = WorkerOrder(*orders.recv())
                worker = workers.setdefault(order.worker, _Worker())
                worker.queue.append(order)
                if len(worker.queue) == 1:
                    _answer(answers, worker, worker.begin_next())
            for pipe, worker in busy.items():
                _answer(answers, worker, worker.process.check(is_ready=pipe in ready))
    except (EOFError, OSError):  # the run has ended, or was killed
        end = time.monotonic() + closing_seconds
        for worker in workers.values():
            worker.process.dismiss()
        for worker in workers.values():
            worker.process.end(end - time.monotonic())


def _answer(answers: Connection, worker: _Worker, report: ChunkReport | None) -> None:
    while report is not None:
        order, seconds = worker.queue.popleft(), worker.process.watch.spent.seconds
        answers.send(tuple(WorkerAnswer(order.call, report, seconds)))
        report = worker.begin_next()


class WorkerKeeper:
    """A keeper and the orders that it has; started by its first order.

    A thread reads its answers, so that neither side waits for the other to read.
    """

    def __init__(self, closing_seconds: float = 0.0) -> None:
        self._closing_seconds = closing_seconds
        self._orders: dict[int, WorkerOrder] = {}
        self._process: SpawnProcess | None = None
        self._channel: Connection
        self._reader: Thread
        self._answers: SimpleQueue[WorkerAnswer | None]
        self._lost = 0

    def send(self, order: WorkerOrder) -> None:
        self._orders[order.call] = order
        self._deliver([order])

    def receive(self, seconds: float | None) -> list[WorkerAnswer]:
        """The answers that are there; waits at most so many seconds for the first.

        Raises:
            EnvironmentFault: the keeper does not start, or is lost too often.
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
        self._orders.clear()
        self._end()

    def _end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        self._channel.close()
        process.join()
        self._reader.join()
        code = process.exitcode
        process.close()
        return code

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
            target=keep_workers,
            args=(theirs, their_answers, self._closing_seconds),
            name="rlx-workers",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        their_answers.close()
        self._answers = SimpleQueue()
        self._reader = Thread(
            target=_read_answers, args=(answers, self._answers), name="rlx-workers", daemon=True
        )
        self._reader.start()

    def _restart(self) -> None:
        """Starts the keeper again and repeats the orders that have no answer."""
        code = self._end() or 0
        self._lost += 1
        if 0 < code != 128 + signal.SIGTERM:
            raise EnvironmentFault(
                f"worker processes cannot start: exit code {code}{_explain_script()}"
            )
        if self._lost > MAX_RESTARTS:
            raise EnvironmentFault(
                f"worker processes are lost again and again (signal {abs(code)}); is there enough "
                "memory?"
            )
        self._deliver(self._orders.values())


def _read_answers(channel: Connection, answers: "SimpleQueue[WorkerAnswer | None]") -> None:
    with channel, suppress(EOFError, OSError):
        while True:
            answers.put(WorkerAnswer(*channel.recv()))
    answers.put(None)


def _explain_script() -> str:
    """A hint for scripts, which worker processes import: they must not start any themselves."""
    main = sys.modules["__main__"]
    if main.__spec__ is None and str(getattr(main, "__file__", "")).endswith(".py"):
        return '; in a script, call rlx below `if __name__ == "__main__":`'
    return ""
