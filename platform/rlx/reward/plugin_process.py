"""The process that calls rewards and environments, and the class by which another one keeps it.

The child calls the plugins: it may hang, die or start processes. The process that keeps it runs no
plugin, so it survives to end the child with everything below it.
"""

import asyncio
import builtins
import inspect
import mmap
import multiprocessing
import numbers
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeGuard

from rlx.descendants import (
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    kill_processes,
    list_descendants,
    reap_orphans,
    wait_for_end,
)
from rlx.plugin import (
    Environment,
    RewardPlugin,
    Sample,
    Score,
    close_sessions,
    has_sessions,
    keep_answers_in,
)
from rlx.plugin_calls import show_plugin_output
from rlx.plugin_files import find_failed_line
from rlx.rollout import check_environment_step
from rlx.stopwatch import Stopwatch
from rlx.text import shorten_for_record

LONGEST_REASON = 500
"""Characters of a reason, a fault or the name of a part that are kept. They may repeat text of the
model, and they are stored with every rollout."""
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError)
"""Exceptions that pickling raises for objects that cannot be sent to another process."""
_STACK_BYTES = 1 << 20
"""Of the threads of rewards that wait, which count against the memory of a worker."""
_LARGEST = 1e18
"""Rewards become float32; their sums and squares must stay finite."""


@dataclass(frozen=True, slots=True)
class RewardJob:
    """One call of one reward, with one sample for scope "sample", the whole group for wider scopes,
    and a deadline in seconds of wall time. `name` is shown with what the plugin prints."""

    reward: RewardPlugin
    samples: tuple[Sample, ...]
    deadline: float
    name: str = ""

    @property
    def concurrency(self) -> int:
        return max(1, int(getattr(self.reward, "concurrency", 1)))

    def run(self) -> "JobOutcome":
        raw = self.reward.score(self._select_input())
        return self._conclude(
            asyncio.run(_wait_for_value(raw)) if inspect.isawaitable(raw) else raw
        )

    async def run_beside_others(self, threads: Executor) -> "JobOutcome":
        """Returns the reward's verdicts while other calls run; on one of `threads` if it is not
        `async`."""
        score, given = self.reward.score, self._select_input()
        if inspect.iscoroutinefunction(score):
            return self._conclude(await score(given))
        loop = asyncio.get_running_loop()
        raw = await loop.run_in_executor(threads, score, given)
        return self._conclude(await _wait_for_value(raw))

    def _select_input(self) -> Any:
        return self.samples[0] if self.reward.scope == "sample" else list(self.samples)

    def _conclude(self, raw: Any) -> "JobOutcome":
        if self.reward.scope == "sample":
            return JobOutcome((_check_verdict(raw),))
        return JobOutcome(_check_verdicts(raw, len(self.samples)))


async def _wait_for_value(raw: Any) -> Any:
    return await raw if inspect.isawaitable(raw) else raw


@dataclass(frozen=True, slots=True)
class EnvironmentCall:
    """One call of a method of an environment, with a deadline in seconds of wall time."""

    environment: Environment
    what: Literal["reset", "step", "release"]
    arguments: tuple[Any, ...]
    deadline: float
    name: str = ""

    def run(self) -> "JobOutcome":
        if self.what == "release":
            self.environment.release(*self.arguments)
            return JobOutcome()
        if self.what == "reset":
            return JobOutcome(value=_check_sendable(self.environment.reset(*self.arguments)))
        result = self.environment.step(*self.arguments)
        try:
            step = check_environment_step(result, self.environment.kinds)
        except ValueError as error:
            raise _VerdictError(str(error)) from error
        _check_sendable(step.state)
        return JobOutcome(value=step)


Work = RewardJob | EnvironmentCall


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """Outcome of a job: one verdict per sample, None for an abstention, or the value of an
    environment's call; or the plugin's fault."""

    verdicts: tuple[Score | None, ...] = ()
    fault: str | None = None
    value: Any = None


class _VerdictError(Exception):
    pass


def pickle_jobs(jobs: Sequence[Work]) -> bytes:
    """Jobs for `run_jobs`, each pickled apart: a plugin that changes its input changes no other
    call."""
    return pickle.dumps([pickle.dumps(job, pickle.HIGHEST_PROTOCOL) for job in jobs])


def run_jobs(
    payload: bytes,
    memory_mb: int | None,
    count_job: Callable[[], None],
    report: Callable[[int, JobOutcome], None],
) -> tuple[list[JobOutcome], bool]:
    """Runs pickled jobs in order: as many as fit into the shortest deadline, at least the first.
    The jobs of a reward with a concurrency run together, and each outcome is reported at once, with
    the job's number.

    A job that runs out of memory fails only if it came first and had the whole allowance of
    `memory_mb`; otherwise it is left for another call.

    Returns:
        Outcomes of the jobs that ran, and whether a call that was given up still runs.
    """
    try:
        _limit_memory(memory_mb)
        with show_plugin_output("import of a plugin"):
            jobs: list[Work] = [pickle.loads(job) for job in pickle.loads(payload)]
        if runs_concurrently(jobs):
            with show_plugin_output(_name_plugin(jobs[0])):
                return [], asyncio.run(_run_beside_each_other(jobs, count_job, report))
        outcomes: list[JobOutcome] = []
        start = time.monotonic()
        shortest = min((job.deadline for job in jobs), default=0.0)
        for job in jobs:
            if outcomes and time.monotonic() - start > shortest:
                break
            count_job()
            try:
                with show_plugin_output(_name_plugin(job)):
                    outcomes.append(_run_job(job))
            except MemoryError:
                if outcomes:
                    break
                outcomes.append(JobOutcome(fault=f"MemoryError: it may take {memory_mb} MiB"))
        return outcomes, False
    finally:
        _limit_memory(None)


def runs_concurrently(jobs: Sequence[Work]) -> TypeGuard[Sequence[RewardJob]]:
    return bool(jobs) and all(isinstance(job, RewardJob) and job.concurrency > 1 for job in jobs)


async def _run_beside_each_other(
    jobs: Sequence[RewardJob],
    count_job: Callable[[], None],
    report: Callable[[int, JobOutcome], None],
) -> bool:
    """Starts the jobs in order, as many at a time as their reward allows; returns whether a thread
    still runs a call that took too long."""
    gate = asyncio.Semaphore(jobs[0].concurrency)
    threading.stack_size(_STACK_BYTES)
    # A thread for every job: one that never ends keeps none of the others waiting.
    threads = _CallThreads(len(jobs))

    async def run(number: int, job: RewardJob) -> None:
        async with gate:
            count_job()
            report(number, await _run_in_time(job, threads))

    async with asyncio.TaskGroup() as group:
        for number, job in enumerate(jobs):
            group.create_task(run(number, job))
    threads.shutdown(wait=False)
    return not all(call.done() for call in threads.calls)


class _CallThreads(ThreadPoolExecutor):
    """Threads that remember their calls."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.calls: list[Future[Any]] = []

    def submit(self, *call: Any, **named: Any) -> Future[Any]:
        self.calls.append(super().submit(*call, **named))
        return self.calls[-1]


async def _run_in_time(job: RewardJob, threads: Executor) -> JobOutcome:
    try:
        async with asyncio.timeout(job.deadline) as limit:
            return await job.run_beside_others(threads)
    except _VerdictError as error:
        return JobOutcome(fault=shorten_for_record(str(error), LONGEST_REASON))
    except BaseException as error:  # noqa: BLE001  as `_run_job`
        if limit.expired():
            return JobOutcome(fault=describe_deadline(job.deadline))
        return JobOutcome(fault=describe_error(error))


def describe_deadline(seconds: float) -> str:
    return f"deadline of {seconds:g} s passed"


def _name_plugin(job: Work) -> str:
    if job.name:
        return job.name
    return type(job.reward if isinstance(job, RewardJob) else job.environment).__name__


def _run_job(job: Work) -> JobOutcome:
    try:
        return job.run()
    except _VerdictError as error:
        return JobOutcome(fault=shorten_for_record(str(error), LONGEST_REASON))
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001  SystemExit is only this scorer's fault, too
        return JobOutcome(fault=describe_error(error))


def _check_verdicts(raw: Any, count: int) -> tuple[Score | None, ...]:
    if getattr(raw, "ndim", None) == 1 and hasattr(raw, "tolist"):  # an array of NumPy or PyTorch
        raw = raw.tolist()
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        raise _VerdictError(f"gave {type(raw).__name__} instead of a list of verdicts")
    verdicts = tuple(map(_check_verdict, raw))
    if len(verdicts) != count:  # which `len(raw)` of a plugin's own class might not be
        raise _VerdictError(f"gave {len(verdicts)} verdicts for {count} samples")
    return verdicts


def _check_verdict(raw: Any) -> Score | None:
    if raw is None:
        return None
    if isinstance(raw, Score):
        if not (raw.reason is None or isinstance(raw.reason, str)):
            raise _VerdictError(f"gave {type(raw.reason).__name__} as a reason")
        if not isinstance(raw.parts, Mapping):
            raise _VerdictError(f"gave {type(raw.parts).__name__} as parts")
        reason = None if raw.reason is None else shorten_for_record(str(raw.reason), LONGEST_REASON)
        parts = {
            shorten_for_record(str(name), LONGEST_REASON): _check_number(part)
            for name, part in raw.parts.items()
        }
        return Score(_check_number(raw.value), reason, parts)
    return Score(_check_number(raw))


def _check_sendable(state: Any) -> Any:
    try:
        pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    except _UNPICKLABLE as error:
        what = f"gave a state that is not of plain values: {type(error).__name__}: {error}"
        raise _VerdictError(what) from error
    return state


def _check_number(raw: Any) -> float:
    if getattr(raw, "ndim", None) == 0 and hasattr(raw, "item"):  # a scalar of NumPy or PyTorch
        raw = raw.item()
    if not isinstance(raw, numbers.Real):
        raise _VerdictError(f"gave {type(raw).__name__} instead of a number")
    value = float(raw)
    if not abs(value) <= _LARGEST:
        raise _VerdictError(f"gave {value}")
    return value


def describe_error(error: BaseException) -> str:
    """An exception of a plugin in words, short and safe to store."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001  an exception that cannot even be printed
        text = f"(and {type(second).__name__} when asked why)"
    line = find_failed_line(error)
    where = "" if line is None else f"line {line} of its file: "
    return shorten_for_record(f"{where}{type(error).__name__}: {text}", LONGEST_REASON)


def _limit_memory(extra_mb: int | None) -> None:
    """Limits the growth of the address space to so many MiB from now on; None removes the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    if extra_mb is not None:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        soft = pages * resource.getpagesize() + (extra_mb << 20)
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_DEADLINE_CHECK_INTERVAL = 0.05
"""Longest time between two looks at the child, in seconds."""
_IMPORT_SECONDS = 60.0
"""Time for imports: of plugins in a fresh child, in addition to two deadlines, and in a chunk's
jobs, of what their plugins import when they are called."""
_RENEW_AFTER = 50_000
"""Jobs after which a child is replaced; limits the damage of a plugin with a slow memory leak."""
_STARTED, _IMPORTING, _COUNTERS = 0, 1, 2
"""Places of what a child writes while its parent reads: how many jobs have started, and whether the
last one is importing something."""


class ChunkReport(NamedTuple):
    """What became of a chunk of jobs.

    Attributes:
        outcomes: the pickled outcomes of the jobs that ran, in order.
        fault: why there are none.
        is_lost: whether the fault is that the process died of itself or was killed.
        cpu_seconds: that the process used to run them.
        is_spent: whether the process has to end: a call that was given up still runs in it, or it
            has run for long and holds no live session.
        finished: numbers and pickled outcomes of jobs that ran beside others and have finished.
        started: number of jobs that had started beside each other; no others are at fault.
    """

    outcomes: bytes = b""
    fault: str | None = None
    is_lost: bool = False
    cpu_seconds: float = 0.0
    is_spent: bool = False
    finished: tuple[tuple[int, bytes], ...] = ()
    started: int = 0


class _Finished(NamedTuple):
    number: int
    outcome: bytes


class ChunkWatch:
    """How long the jobs of a chunk have taken.

    Only the time that this process has seen pass counts against a deadline, because a pause of the
    machine or job is no fault of a plugin. Where jobs run beside each other, the child ends those
    that take too long; it is ended itself if for two deadlines none of them starts or finishes.

    Attributes:
        interval: the longest time between two looks at the child, in seconds.
        current: number of jobs that have started.
        spent: time since the last of them started.
        importing: seconds of imports, which do not count.
        finished: outcomes of jobs that have finished before the others.
    """

    def __init__(self, deadlines: Sequence[float] = (), *, is_concurrent: bool = False) -> None:
        self.deadlines, self.is_concurrent = deadlines, is_concurrent
        self.interval = min((_DEADLINE_CHECK_INTERVAL, *(each / 4 for each in deadlines)))
        self.current, self.spent, self.importing = 0, Stopwatch(2 * self.interval), 0.0
        self.finished: dict[int, bytes] = {}

    @property
    def limit(self) -> float:
        """Seconds that the current job may take; until the first starts, the child imports the
        plugins."""
        if not self.current:
            return 2 * max(self.deadlines, default=0.0) + _IMPORT_SECONDS
        return (2 if self.is_concurrent else 1) * self.deadlines[self.current - 1]


class JobProcess:
    """The child process that runs jobs; starts a new one in place of one that has ended."""

    closed_in_children: ClassVar[tuple[Connection, ...]] = ()
    _running: ClassVar[dict[int, "JobProcess"]] = {}
    """Those of this process that have a child, by its id."""

    def __init__(self) -> None:
        # Each is written at once, unlike by `struct`, which writes zeros first.
        self._counters = memoryview(mmap.mmap(-1, 8 * _COUNTERS)).cast("q")
        self._before = 0
        self._calls = 0
        """In the child: how many jobs it has run."""
        self._pid: int | None = None
        self._own_pid = 0
        """In the child: its process id, which a copy of it that a plugin forked does not have."""
        self.pipe: Connection
        self.watch = ChunkWatch()

    def begin(self, chunk: bytes, deadlines: Sequence[float], *, is_concurrent: bool) -> None:
        """Sends pickled jobs to the child, after starting it if there is none.

        Raises:
            OSError: the child has just died.
        """
        self.watch = ChunkWatch(deadlines, is_concurrent=is_concurrent)
        if self._pid is not None and self._has_ended():
            self.end()
        if self._pid is None:
            self._start()
        # Before it is sent: the child is fast, and this process may be slow.
        self._before = self._counters[_STARTED]
        self.pipe.send_bytes(chunk)

    def check(self, *, is_ready: bool) -> ChunkReport | None:
        """What became of the chunk, or None while it runs; ends a child that takes too long."""
        watch = self.watch
        if is_ready or self._has_ended():
            report = self._receive()
            if isinstance(report, _Finished):
                watch.finished[report.number] = report.outcome
                watch.spent.restart()
                return None
        else:
            before, watch.current = watch.current, self._counters[_STARTED] - self._before
            if watch.current != before:
                watch.spent.restart()
            if self._counters[_IMPORTING] and watch.importing < _IMPORT_SECONDS:
                watch.importing += watch.spent.skip()
            if watch.spent.look() <= watch.limit:
                return None
            self.end()
            if watch.deadlines:
                deadline = watch.deadlines[max(watch.current - 1, 0)]
                report = ChunkReport(fault=describe_deadline(deadline))
            else:  # as of the chunk by which a worker shows that it has started
                report = ChunkReport(fault=f"no process has begun within {watch.limit:g} s")
        if report.is_spent:
            self.end()
        started = self._counters[_STARTED] - self._before if watch.is_concurrent else 0
        return report._replace(finished=tuple(watch.finished.items()), started=started)

    def _receive(self) -> ChunkReport | _Finished:
        try:
            if not self.pipe.poll():
                return self.report_death()
            report: ChunkReport | _Finished = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return self.report_death()
        if isinstance(report, ChunkReport):
            reap_orphans(self._running)
        return report

    def report_death(self) -> ChunkReport:
        code = self.end()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ChunkReport(fault=f"process died ({how})", is_lost=True)

    def dismiss(self) -> None:
        """Has the child close its live sessions and end, once its call is over."""
        if self._pid is not None:
            self.pipe.close()

    def end(self, patience: float = 0.0) -> int:
        """Ends the child, which may close its live sessions for `patience` seconds, and everything
        that it started; returns its exit code."""
        pid, code = self._pid, 0
        if pid is not None:
            self.pipe.close()
            if patience > 0:
                wait_for_end(pid, patience)
            below = list_descendants(pid)
            if not self._has_ended():
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._pid = None
            del self._running[pid]
            kill_processes(below)
        # Living children adopt their own orphans, so that others are those of dead ones.
        kill_descendants(spare=tuple(self._running))
        return code

    def _start(self) -> None:
        self._counters[_IMPORTING] = False
        self.pipe, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if not pid:
            for process in (self, *self._running.values()):  # their ends must be noticed
                process.pipe.close()
            for channel in self.closed_in_children:
                channel.close()
            self._serve(theirs)
        theirs.close()
        self._pid = pid
        self._running[pid] = self

    def _serve(self, pipe: Connection) -> NoReturn:
        try:
            self._own_pid = os.getpid()
            die_with_parent()
            adopt_orphans()
            os.register_at_fork(after_in_child=pipe.close)  # its end must be that of this process
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            builtins.__import__ = partial(self._import, builtins.__import__)
            while True:
                payload, memory_mb, answers = pickle.loads(pipe.recv_bytes())
                keep_answers_in(answers)
                pipe.send_bytes(pickle.dumps(self._run_jobs(payload, memory_mb, pipe)))
        except (EOFError, OSError):
            close_sessions()
            os._exit(0)
        finally:
            os._exit(1)

    def _run_jobs(self, payload: bytes, memory_mb: int | None, pipe: Connection) -> ChunkReport:
        began = time.process_time()

        def report(number: int, outcome: JobOutcome) -> None:
            data = pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)
            pipe.send_bytes(pickle.dumps(_Finished(number, data)))

        try:
            outcomes, is_spent = run_jobs(payload, memory_mb, self._count_job, report)
        except Exception as error:  # noqa: BLE001  (unpickling imports plugins, which may raise)
            return ChunkReport(fault=f"cannot be read by a worker: {describe_error(error)}")
        pickled = pickle.dumps(outcomes, pickle.HIGHEST_PROTOCOL)
        if not has_sessions():  # whose own processes they could be
            reap_orphans()
        self._calls += len(outcomes)
        is_old = self._calls > _RENEW_AFTER and not has_sessions()
        cpu_seconds = time.process_time() - began
        return ChunkReport(pickled, cpu_seconds=cpu_seconds, is_spent=is_spent or is_old)

    def _count_job(self) -> None:
        if os.getpid() != self._own_pid:  # a plugin forked, and its copy did not end
            os._exit(0)
        self._counters[_IMPORTING] = False
        self._counters[_STARTED] += 1

    def _import(self, load: Callable[..., Any], name: str, *rest: Any, **named: Any) -> Any:
        """In the child: imports as Python does, and notes how long."""
        if self._counters[_IMPORTING]:
            return load(name, *rest, **named)
        self._counters[_IMPORTING] = True
        try:
            return load(name, *rest, **named)
        finally:
            self._counters[_IMPORTING] = False

    def _has_ended(self) -> bool:
        assert self._pid is not None
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def start_worker() -> None:
    """Prepares the process that has the children.

    It leaves its parent's session, because torchrun ends a rank by a signal to the whole process
    group while the rank still scores its current step.
    """
    os.setsid()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    os.dup2(sys.__stderr__.fileno() if sys.__stderr__ else 2, 1)


def _leave() -> NoReturn:
    """Also in the midst of `JobProcess.end`, whose state is then half changed."""
    try:
        kill_descendants()
    finally:
        os._exit(128 + signal.SIGTERM)
