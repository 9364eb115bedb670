"""Runs a plugin's code in separate processes, which may hang or die."""

import atexit
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessPool

from rlx.plugin import Environment
from rlx.reward import JobOutcome, PooledHost, RewardJob, RewardPool
from rlx.spec import EnvironmentUse, RunnerSpec

_SECONDS = 30.0
_PROBE = """
import json, sys
sys.path[:], module, name = json.loads(sys.argv[1])
import rlx.plugin
before, raised = set(sys.modules), None
try:
    getattr(__import__(module, fromlist=["_"]), name)
except BaseException as error:
    raised = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps([sorted(set(sys.modules) - before), raised]))
"""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Effects of importing a module in a process that had imported only `rlx.plugin`.

    Attributes:
        modules: modules that the import loaded.
        raised: the exception, if it raised one.
        died: how the process ended or exceeded its time limit, if it did.
    """

    modules: frozenset[str] = frozenset()
    raised: str | None = None
    died: str | None = None


def first_import(module: str, name: str) -> ImportReport:
    """Imports a module in a fresh interpreter and looks up `name` in it."""
    arguments = json.dumps([sys.path, module, name])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return ImportReport(died=f"did not end in {_SECONDS:g} s")
    try:
        modules, raised = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return ImportReport(died=f"ended its process with exit code {done.returncode}")
    return ImportReport(frozenset(modules), raised)


# Process pools -----------------------------------------------------------------------------------

_kept: dict[str, tuple[tuple[str, ...], ProcessPool | RewardPool]] = {}
"""One pool of each kind, reused while `sys.path` is unchanged: processes are slow to start."""


def _get_kept_pool(sort: str, start: Callable[[], Any]) -> Any:
    path = tuple(sys.path)
    if sort in _kept and _kept[sort][0] != path:
        _stop_pool(_kept.pop(sort)[1])
    if sort not in _kept:
        _kept[sort] = (path, start())
    return _kept[sort][1]


def _stop_pool(pool: ProcessPool | RewardPool) -> None:
    if isinstance(pool, RewardPool):
        pool.close()
    else:
        pool.stop()
        pool.join()


@atexit.register
def _end_all() -> None:
    while _kept:
        _stop_pool(_kept.popitem()[1][1])


def _process_pool() -> ProcessPool:
    return ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn"))


def _reward_pool() -> RewardPool:
    return RewardPool(workers=1, memory_mb=RunnerSpec().reward_memory_mb)


def run_in_subprocess(function: Callable[..., Any], *arguments: Any, fresh: bool = False) -> Any:
    """Returns the result of `function(*arguments)` in another process.

    Args:
        function: must be picklable, and so must its arguments.
        arguments: arguments of the function.
        fresh: use a newly started process.

    Raises:
        AssertionError: it raised, hung, or ended its process; the message says which.
    """
    pool = _process_pool() if fresh else _get_kept_pool("any", _process_pool)
    try:
        return pool.schedule(function, args=arguments, timeout=_SECONDS).result()
    except TimeoutError:
        raise AssertionError(f"did not end in {_SECONDS:g} s") from None
    except (ProcessExpired, BrokenExecutor) as error:
        raise AssertionError(f"ended its process: {error}") from None
    except Exception as error:
        raise AssertionError(f"raised {type(error).__name__}: {error}") from error
    finally:
        if fresh:
            _stop_pool(pool)


def score_jobs(jobs: Sequence[RewardJob], *, fresh: bool = False) -> list[JobOutcome]:
    """Scores as a run does, in a worker with a deadline and a memory cap.

    Args:
        jobs: calls of rewards.
        fresh: use a newly started worker.
    """
    with _open_reward_pool(fresh) as pool:
        return pool.score(jobs)


@contextmanager
def open_environment_host(environment: Environment, *, fresh: bool = False) -> Iterator[PooledHost]:
    """Hosts an environment as a run does, in a worker with the default deadline.

    Args:
        environment: the plugin.
        fresh: use a newly started worker.
    """
    with _open_reward_pool(fresh) as pool:
        yield PooledHost(environment, pool, EnvironmentUse.model_fields["deadline"].default)


@contextmanager
def _open_reward_pool(fresh: bool) -> Iterator[RewardPool]:
    if not fresh:
        yield _get_kept_pool("reward", _reward_pool)
        return
    with _reward_pool() as pool:
        yield pool
