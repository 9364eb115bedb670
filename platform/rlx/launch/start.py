"""Starts an experiment as a recorded run, and stops runs."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from rlx.checkpoint import pin_checkpoint
from rlx.discovery import ExperimentPlugins
from rlx.errors import SpecError
from rlx.launch.jobs import cancel_job, reconcile_job
from rlx.launch.processes import is_abandoned, is_supervisor, this_machine
from rlx.launch.run_access import (
    BROKEN_OFF,
    KILLED,
    end_orphaned_run,
    locate_run_folder,
    open_registry,
)
from rlx.launch.submission import registry_url, submit_run
from rlx.launch.takeover import launch_run
from rlx.reporting import Report, log_report
from rlx.spec.reading import LoadedSpec
from rlx_registry import ENDED, Registry, RunRecord, find_changed_plugins

__all__ = ["find_finished_runs", "start_experiment", "stop_run"]


def find_finished_runs(
    url: str, experiments: Sequence[tuple[LoadedSpec, ExperimentPlugins]]
) -> list[RunRecord | None]:
    """Finds for each experiment the newest finished run that is the same, before any check of it.

    Args:
        url: of the registry; it may not exist yet.
        experiments: each with its plugins.

    Returns:
        The runs; None where there is none, or where it cannot be known, such as for a checkpoint
        to start from that is missing.
    """
    try:
        with open_registry(url) as registry:
            return [_find_finished_run(registry, *experiment) for experiment in experiments]
    except SpecError:  # the submission itself reports it
        return [None for _ in experiments]


def _find_finished_run(
    registry: Registry, read: LoadedSpec, plugins: ExperimentPlugins
) -> RunRecord | None:
    spec = pin_checkpoint(registry, read).spec
    digest, records = plugins.compute_digest(spec), plugins.list_records()
    tokenizer = getattr(spec.model, "tokenizer", None)
    for run in registry.runs(digest=digest, name=spec.name, status="finished"):
        # null and a closed vocabulary have one digest, but only null fits every task.
        same = run.seed == spec.seed and run.spec["model"].get("tokenizer") == tokenizer
        if same and not find_changed_plugins(records, run.plugins):
            return run
    return None


def start_experiment(
    registry: Registry,
    read: LoadedSpec,
    plugins: ExperimentPlugins,
    *,
    again: bool,
    queue: bool,
) -> tuple[RunRecord, bool]:
    """Records a run and starts its supervisor, or submits its job.

    Args:
        registry: the experiment's, open for writing.
        read: the experiment.
        plugins: its plugins.
        again: run even if an identical run has finished or is active.
        queue: leave the run to any worker.

    Returns:
        The run, and whether it is new.

    Raises:
        InvalidSpec: the checkpoint to start from is missing, damaged, or of another model.
    """
    job = read.spec.runner.launcher.submits_jobs
    run, created = submit_run(registry, read, plugins, again=again, queue=queue or job)
    if not created and _is_over(registry, run):
        run, created = submit_run(registry, read, plugins, again=again, queue=queue or job)
    if created and (job or not queue):
        launch_run(registry, run, registry_url(read))
    return run, created


def _is_over(registry: Registry, run: RunRecord) -> bool:
    """Returns whether a run has ended; records it as lost if its supervisor died silently."""
    run = reconcile_job(registry, run)
    if run.status in ("failed", "stopped", "lost"):
        return True
    reason = BROKEN_OFF if run.status == "queued" else KILLED
    return is_abandoned(run) and end_orphaned_run(registry, run, "lost", reason)


def stop_run(registry: Registry, run_id: str, *, report: Report = log_report) -> None:
    """Stops a run between two steps, with a checkpoint; a second call stops it immediately.

    Args:
        registry: open for writing.
        run_id: the run.
        report: called with what was done.

    Raises:
        SpecError: the run is not running.
    """
    found = reconcile_job(registry, registry.run(run_id))
    if found.status in ENDED and found.status != "lost":
        raise SpecError(f"{found.id} is not running: it is {found.status}")
    if found.status == "running" and not is_abandoned(found):
        _request_run_stop(registry, found, report)
        return
    # A supervisor that has not begun yet sees the changed status and exits.
    why = KILLED if found.status in ("running", "lost") else "it had not begun"
    if not end_orphaned_run(registry, found, "stopped", why):
        stop_run(registry, run_id, report=report)  # it has begun, or ended, in the meantime
        return
    if found.directory is not None:
        cancel_job(locate_run_folder(found))
    report(f"{found.id}: {why}; marked as stopped", err=True)


def _request_run_stop(registry: Registry, run: RunRecord, report: Report) -> None:
    """Leaves a request for the run's supervisor; on this machine a signal delivers it at once.

    The supervisor of another user, or in another container, finds the request itself.
    """
    again = run.request is not None
    if not registry.leave_request(run.id, "kill" if again else "stop"):
        stop_run(registry, run.id, report=report)  # it has ended, or is queued again
        return
    is_here = run.host in (None, this_machine())
    if is_here and run.pid is not None and is_supervisor(run.pid, run.id):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(run.pid, signal.SIGTERM)
    if again:
        report(f"{run.id}: asked to stop immediately, without a checkpoint")
    else:
        report(f"{run.id}: asked to stop (repeat to stop it immediately)")
