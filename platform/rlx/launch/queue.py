"""Runs the queued runs of a group, so many at a time."""

from collections.abc import Callable, Collection
from itertools import count

from rlx.errors import EnvironmentFault, RlxError
from rlx.launch.devices import build_device_request
from rlx.launch.launcher import reconcile_job
from rlx.launch.processes import is_abandoned, is_job
from rlx.launch.run_access import (
    attempts_used,
    find_runs,
    is_spec_of_run,
    load_resolved_spec,
    locate_run_folder,
)
from rlx.launch.start_stop import continue_run
from rlx.progress import Report, log_report
from rlx.stopwatch import CLOCK, Clock
from rlx.text import escape_unprintable
from rlx_registry import (
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    NotFoundError,
    Registry,
    RunRecord,
)

QUEUE_CHECK_INTERVAL = 1.0
"""Seconds between two looks at the runs."""
REGISTRY_PAUSE = 25.0
"""Seconds before a registry that cannot be reached is asked again."""
ALIVE = ("submitted", "running")


def run_queue(
    registry: Registry,
    url: str,
    ids: Collection[str],
    at_once: int,
    *,
    report: Report = log_report,
    look: Callable[[], None] = lambda: None,
    clock: Clock = CLOCK,
) -> None:
    """Starts the queued and the lost of some runs, in their order, and waits until all have ended.

    A run that is started waits for its devices by itself. Jobs are only waited for.

    Args:
        registry: open for writing.
        url: URL of the registry, for supervisors.
        at_once: number of runs at a time.
        report: called once with why a run is skipped.
        look: called about once a second, and before the first run is started.
        clock: the pauses'.
    """
    skipped: set[str] = set()
    for turn in count():
        try:
            look()
            runs = [run for run in find_runs(registry, ids) if run.id not in skipped]
            jobs = [run for run in runs if run.status in ("queued", *ALIVE) and is_job(run)]
            if jobs:
                reconcile_job(registry, jobs[turn % len(jobs)])
            lost = [run for run in runs if run not in jobs and is_abandoned(run)]
            alive = [r for r in runs if r not in (*jobs, *lost) and r.status in ALIVE]
            waiting = [r for r in runs if r in lost or (r not in jobs and r.status == "queued")]
            if waiting and len(alive) < at_once:
                why = _start_run(registry, waiting[0], url)
                if why:
                    skipped.add(waiting[0].id)
                    report(f"{waiting[0].id} skipped: {escape_unprintable(why)}", err=True)
                continue
        except DatabaseUnwritableError:
            raise
        except DatabaseUnavailableError as error:  # it may recover
            report(f"waiting for the registry: {escape_unprintable(str(error))}", err=True)
            clock.pause(REGISTRY_PAUSE)
            continue
        if not (jobs or alive or waiting):
            return
        clock.pause(QUEUE_CHECK_INTERVAL)


def _start_run(registry: Registry, run: RunRecord, url: str) -> str:
    """Starts the supervisor of a run; returns why it is left alone, or ""."""
    try:
        # `rlx resume --set` may have changed the one in the run's folder.
        spec = load_resolved_spec(locate_run_folder(run))
        if not is_spec_of_run(spec, run):
            raise EnvironmentFault("the folder here belongs to another registry's run")
        if spec.runner.launcher.submits_jobs:
            raise EnvironmentFault(f"{spec.runner.launcher.kind} has not taken it")
        if run.status != "queued":
            if run.request is not None:
                registry.transition(run.id, {run.status}, "stopped", "stopped on request")
                raise EnvironmentFault("it was asked to stop")
            used = attempts_used(registry, run.id)
            if used >= spec.runner.max_attempts:
                raise EnvironmentFault(f"it is lost after {used} attempts")
        build_device_request(spec)
        how = "taken from the queue" if run.status == "queued" else "taken over"
        continue_run(registry, run, url, reason=how)
    except FileNotFoundError:
        return "its folder is not on this machine"
    except NotFoundError:
        return "it has just been removed"
    except (ValueError, OSError, RlxError) as error:
        return str(error).splitlines()[0]
    return ""
