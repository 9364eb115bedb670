"""Deals calls of rewards and environments to worker processes."""

import itertools
import math
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

from rlx.errors import EnvironmentFault
from rlx.plugin import Action, Environment, SessionState, StatefulEnvironment, Step
from rlx.reward.plugin_process import (
    ChunkReport,
    EnvironmentCall,
    JobOutcome,
    Work,
    describe_deadline,
    describe_error,
    pickle_jobs,
    runs_concurrently,
)
from rlx.reward.workers import MAX_RESTARTS, WorkerAnswer, WorkerKeeper, WorkerOrder
from rlx.rollout import EnvironmentHost, HostFault, Method
from rlx.spec import EnvironmentLimits
from rlx.text import escape_unprintable

_CHUNK = 64
_AHEAD = 2
"""Chunks that are sent to each worker at once, so that it need not wait for the next one."""
_CLOSING = 5.0
"""Seconds in which the workers may close their sessions when a run ends."""

_Positions = tuple[int, ...]


class Closable(Protocol):
    """What can be kept with a pool."""

    def close(self) -> None: ...


Kept = TypeVar("Kept", bound=Closable)


class RewardPool:
    """A pool of worker processes that run jobs; a context manager.

    Args:
        memory_mb: MiB of address space that a job may add to its worker's.
        answers: the file that keeps what rewards recall (`rlx.plugin.recall`); None keeps nothing.

    Attributes:
        keeper: of the live sessions of environments, in processes of their own.
        cpu_seconds: that the workers have used so far for jobs.

    Raises:
        EnvironmentFault: the workers do not start.
    """

    def __init__(self, workers: int, memory_mb: int, answers: Path | None = None) -> None:
        self.cpu_seconds = 0.0
        self.count, self.memory_mb, self._answers = workers, memory_mb, answers
        self.keeper = WorkerKeeper(_CLOSING)
        self._kept: dict[type[Closable], Any] = {}
        self._workers = WorkerKeeper()
        try:
            for _ in range(1 + MAX_RESTARTS):
                self._send(0, [], False)
                (answer,) = self._workers.receive(None)
                if (fault := answer.report.fault) is None:
                    return
            raise EnvironmentFault(f"reward workers cannot start: {fault}; is there enough memory?")
        except BaseException:
            self._workers.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def keep(self, kind: type[Kept]) -> Kept:
        """The one object of a kind that is closed with the pool, made when it is first wanted."""
        if kind not in self._kept:
            self._kept[kind] = kind()
        kept: Kept = self._kept[kind]
        return kept

    def close(self) -> None:
        """Closes live sessions and what is kept, and ends the workers at once, even during a
        job."""
        for kept in self._kept.values():
            kept.close()
        self.keeper.close()
        self._workers.close()

    def score(self, jobs: Sequence[Work]) -> list[JobOutcome]:
        """Runs the jobs and returns their outcomes in order. No plugin can make it raise.

        Raises:
            EnvironmentFault: something kills the workers again and again.
        """
        outcomes: dict[int, JobOutcome] = {}
        # One process keeps to the concurrency of a reward, so it has all of its jobs.
        is_concurrent = runs_concurrently(jobs)
        size = len(jobs) if is_concurrent else min(_CHUNK, math.ceil(len(jobs) / self.count))
        starts = range(0, len(jobs), max(size, 1))
        queue = deque(tuple(range(i, min(i + size, len(jobs)))) for i in starts)
        running: dict[int, tuple[int, _Positions]] = {}
        loads = dict.fromkeys(range(self.count), 0)
        while queue or running:
            while queue and len(running) < _AHEAD * self.count:
                positions = queue.popleft()
                worker = min(loads, key=lambda number: loads[number])
                try:
                    chunk = [jobs[position] for position in positions]
                    call = self._send(worker, chunk, is_concurrent)
                except Exception as error:  # noqa: BLE001  (pickling runs the plugin's code)
                    fault = f"cannot be sent to a worker: {describe_error(error)}"
                    queue.extend(_isolate_fault(positions, fault, outcomes))
                else:
                    running[call] = worker, positions
                    loads[worker] += 1
            for answer in self._workers.receive(None):
                if answer.call in running:  # and not of a call of `score` that was interrupted
                    worker, positions = running.pop(answer.call)
                    loads[worker] -= 1
                    self.cpu_seconds += answer.report.cpu_seconds
                    queue.extend(_collect_outcomes(answer.report, positions, outcomes))
        return [outcomes[position] for position in range(len(jobs))]

    def _send(self, worker: int, jobs: Sequence[Work], is_concurrent: bool) -> int:
        order = WorkerOrder(
            worker,
            next(_call_numbers),
            tuple(job.deadline for job in jobs),
            pickle_jobs(jobs),
            self.memory_mb,
            self._answers,
            is_concurrent,
        )
        self._workers.send(order)
        return order.call


def _collect_outcomes(
    report: ChunkReport, positions: _Positions, outcomes: dict[int, JobOutcome]
) -> Iterable[_Positions]:
    """Records the outcomes of a chunk and returns the jobs that must run, or run again."""
    for number, outcome in report.finished:
        outcomes[positions[number]] = pickle.loads(outcome)
    if report.started:  # of jobs that ran beside each other
        begun = tuple(p for p in positions[: report.started] if p not in outcomes)
        waiting = positions[report.started :]
        again = _isolate_fault(begun, report.fault or "no outcome", outcomes) if begun else ()
        return [*again, *([waiting] if waiting else [])]
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


def host_environment(
    environment: Environment, pool: RewardPool, limits: EnvironmentLimits, name: str = ""
) -> EnvironmentHost:
    """Hosts an environment in worker processes."""
    if isinstance(environment, StatefulEnvironment):
        return SessionHost(environment, pool, limits, name)
    return PooledHost(environment, pool, limits.call, name)


class PooledHost(EnvironmentHost):
    """Runs an environment in worker processes; a call that raises, hangs or crashes gives a
    fault."""

    def __init__(
        self, environment: Environment, pool: RewardPool, deadline: float, name: str = ""
    ) -> None:
        self._environment, self._pool, self._deadline = environment, pool, deadline
        self._name = name

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        return self._run("reset", calls)

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        return self._run("step", calls)

    def _run(self, what: Method, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        jobs = [
            EnvironmentCall(self._environment, what, tuple(call), self._deadline, self._name)
            for call in calls
        ]
        return [
            outcome.value if outcome.fault is None else HostFault(outcome.fault)
            for outcome in self._pool.score(jobs)
        ]


@dataclass(slots=True, eq=False)
class _Session:
    """A live session: where it is, and the turns and seconds that it has had."""

    worker: int
    turns: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _SessionCall:
    """A call of a live session that has no answer yet, which the caller knows by `number`."""

    number: int
    job: EnvironmentCall
    session: _Session
    deadline: float = 0.0
    is_awaited: bool = True
    is_repeated: bool = False


class SessionHost(EnvironmentHost):
    """Runs an environment with live sessions.

    Sessions of a replayable environment share a few workers. Any other session has a worker of its
    own, so that a call that hangs, crashes or waits costs no other session.
    """

    def __init__(
        self,
        environment: StatefulEnvironment,
        pool: RewardPool,
        limits: EnvironmentLimits,
        name: str = "",
    ) -> None:
        self._environment, self._pool, self._limits, self._name = environment, pool, limits, name
        self._shares, self.patience = environment.replayable, limits.patience
        self._loads = dict.fromkeys(range(pool.count if self._shares else limits.sessions), 0)
        self._sessions: dict[str, _Session] = {}
        self._calls: dict[int, _SessionCall] = {}
        self._held: deque[tuple[int, EnvironmentCall]] = deque()
        self._ready: list[tuple[int, Any]] = []

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        return self._run("reset", calls)

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        return self._run("step", calls)

    def _run(self, what: Method, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        for number, arguments in enumerate(calls):
            self.submit(number, what, arguments)
        answers: dict[int, Any] = {}
        while len(answers) < len(calls):
            answers |= self.collect(None)
        return [answers[number] for number in range(len(calls))]

    def submit(self, number: int, what: Method, arguments: tuple[Any, Any]) -> None:
        job = self._build_call(what, arguments)
        if what == "reset":
            self._held.append((number, job))
            self._open_held()
            return
        state: SessionState = arguments[0]
        session = self._sessions.get(state.session)
        if session is None or session.turns != len(state.actions):  # a branch, or played to its end
            session = self._begin_session(
                self._choose_worker() if session is None else session.worker
            )
        self._send(_SessionCall(number, job, session))

    def collect(self, seconds: float | None) -> list[tuple[int, Any]]:
        if seconds is None and not (self._ready or self._calls):
            self._open_held(beyond_limit=True)
        while not self._ready and self._calls:
            answers = self._pool.keeper.receive(seconds)
            for answer in answers:
                if (call := self._calls.pop(answer.call, None)) is not None:
                    self._pool.cpu_seconds += answer.report.cpu_seconds
                    self._take_answer(call, answer)
            if not answers:
                break
        ready, self._ready = self._ready, []
        return ready

    def release(self, states: Sequence[Any]) -> None:
        """Does not wait until they are closed."""
        for state in states:
            if (session := self._sessions.pop(state.session, None)) is not None:
                for call in self._calls.values():
                    call.is_awaited = call.is_awaited and call.session is not session
                job = self._build_call("release", (state,))
                self._send(_SessionCall(0, job, session, is_awaited=False))

    def _build_call(
        self, what: Literal["reset", "step", "release"], arguments: tuple[Any, ...]
    ) -> EnvironmentCall:
        limit = self._limits.call
        return EnvironmentCall(self._environment, what, tuple(arguments), limit, self._name)

    def _open_held(self, *, beyond_limit: bool = False) -> None:
        while self._held:
            worker = self._choose_worker()
            if self._loads[worker] and not (self._shares or beyond_limit):
                return
            self._send(_SessionCall(*self._held.popleft(), self._begin_session(worker)))

    def _choose_worker(self) -> int:
        return min(self._loads, key=lambda worker: (self._loads[worker], worker))

    def _begin_session(self, worker: int) -> _Session:
        self._loads[worker] += 1
        return _Session(worker)

    def _send(self, call: _SessionCall) -> None:
        try:
            payload = pickle_jobs([call.job])
        except Exception as error:  # noqa: BLE001  (pickling runs the plugin's code)
            self._end_call(call, HostFault(f"cannot be sent to a worker: {describe_error(error)}"))
            return
        left = self._limits.episode - call.session.seconds
        call.deadline = max(_SHORTEST, min(call.job.deadline, left))
        number, memory_mb = next(_call_numbers), self._pool.memory_mb if self._shares else None
        self._calls[number] = call
        self._pool.keeper.send(
            WorkerOrder(call.session.worker, number, (call.deadline,), payload, memory_mb)
        )

    def _take_answer(self, call: _SessionCall, answer: WorkerAnswer) -> None:
        report = answer.report
        may_repeat = self._shares or call.job.what == "reset"
        if report.is_lost and may_repeat and not call.is_repeated:
            call.is_repeated = True  # what ended the worker may have had nothing to do with it
            self._send(call)
            return
        call.session.seconds += answer.seconds
        if report.fault is not None:
            fault = report.fault
            if call.deadline < call.job.deadline and fault == describe_deadline(call.deadline):
                fault = f"deadline of {self._limits.episode:g} s for an episode passed"
            self._end_call(call, HostFault(fault))
            return
        try:
            outcome: JobOutcome = pickle.loads(report.outcomes)[0]
        except Exception as error:  # noqa: BLE001  (unpickling runs the plugin's code)
            outcome = JobOutcome(fault=f"gave what cannot be read: {describe_error(error)}")
        value = outcome.value if outcome.fault is None else HostFault(outcome.fault)
        self._end_call(call, value)

    def _end_call(self, call: _SessionCall, value: Any) -> None:
        session = call.session
        if call.job.what == "release":
            if isinstance(value, HostFault):
                said = f"a session cannot be closed: {value.reason}"
                sys.stderr.write(f"{escape_unprintable(said)}\n")
            self._loads[session.worker] -= 1
            self._open_held()
        elif call.is_awaited:
            self._ready.append((call.number, value))
            before = call.job.arguments[0].session if call.job.what == "step" else ""
            if self._sessions.get(before) is session:
                del self._sessions[before]
            if isinstance(value, HostFault) or (isinstance(value, Step) and value.done):
                self._loads[session.worker] -= 1
                self._open_held()
            else:
                state: SessionState = value.state if isinstance(value, Step) else value
                session.turns = len(state.actions)
                self._sessions[state.session] = session


_call_numbers = itertools.count()
_SHORTEST = 0.001
"""Shortest deadline in seconds, of a call whose episode has no time left."""
