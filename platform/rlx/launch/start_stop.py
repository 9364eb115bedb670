"""Starts an experiment as a recorded run, resumes, watches and stops runs."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rlx.checkpoint import pin_checkpoint
from rlx.discovery import ExperimentPlugins, list_plugin_records
from rlx.errors import SpecError
from rlx.home import RunFolder
from rlx.launch.launcher import cancel_job, leave_job, reconcile_job, submit_job
from rlx.launch.processes import (
    delay_interrupts,
    has_lost_supervisor,
    is_abandoned,
    is_job,
    is_supervisor,
    list_live_ranks,
    this_machine,
)
from rlx.launch.run_access import (
    BROKEN_OFF,
    KILLED,
    end_orphaned_run,
    fail_unless_started,
    load_resolved_spec,
    locate_run_folder,
    open_registry,
    put_spec,
)
from rlx.launch.submission import registry_url, start_supervisor, submit_run
from rlx.progress import Progress, Report, log_report, read_progress
from rlx.spec import ExperimentSpec
from rlx.spec.reading import LoadedSpec
from rlx.stopwatch import CLOCK, Clock
from rlx_registry import (
    ENDED,
    RESUMED,
    Registry,
    RunRecord,
    Status,
    find_changed_plugins,
    forget_supervisor,
    record_supervisor,
)


def find_finished_runs(
    url: str, experiments: Sequence[tuple[LoadedSpec, ExperimentPlugins]]
) -> list[RunRecord | None]:
    """Finds for each experiment the newest finished run that is the same, before any check of it.

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
    digest, records = plugins.compute_digest(spec), list_plugin_records(spec, plugins)
    tokenizer = getattr(spec.model, "tokenizer", None)
    for run in registry.runs(digest=digest, name=spec.name, statuses=["finished"]):
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
    anyway: bool = False,
) -> tuple[RunRecord, bool]:
    """Records a run as `submit_run` does, and starts its supervisor or submits its job, unless
    `queue` leaves it to others.
    """
    job = read.spec.runner.launcher.submits_jobs
    record = partial(
        submit_run, registry, read, plugins, again=again, queue=queue or job, anyway=anyway
    )
    run, created = record()
    if not created and _is_over(registry, run):
        run, created = record()
    if created and (job or not queue):
        with fail_unless_started(registry, run.id):
            _launch_run(registry, run, registry_url(read), is_job=job)
    return run, created


def _is_over(registry: Registry, run: RunRecord) -> bool:
    """Whether a run has ended; records it as lost if its supervisor died silently."""
    run = reconcile_job(registry, run)
    if run.status in ("failed", "stopped", "lost"):
        return True
    reason = BROKEN_OFF if run.status == "queued" else KILLED
    return is_abandoned(run) and end_orphaned_run(registry, run, "lost", reason)


def stop_run(registry: Registry, run_id: str, *, report: Report = log_report) -> None:
    """Stops a run between two steps, with a checkpoint; a second call stops it immediately.

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
    how = "immediately, without a checkpoint" if again else "(repeat to stop it immediately)"
    report(f"{run.id}: asked to stop {how}")


def start_job(registry: Registry, run: RunRecord, registry_url: str) -> None:
    """Submits a run as a job if it needs one: it was just recorded here, the process that has
    recorded it was killed, or its job was lost.

    Raises:
        EnvironmentFault: the job system is not installed here, or rejects the job; the run stays
            queued, and may be submitted later.
    """
    folder = locate_run_folder(run)
    if not load_resolved_spec(folder).runner.launcher.submits_jobs:
        return
    run = reconcile_job(registry, run)
    is_ours = run.pid is None or (run.pid == os.getpid() and run.host == this_machine())
    if run.status == "lost":
        continue_run(registry, run, registry_url)
    elif run.status == "queued" and not is_job(run) and (is_ours or has_lost_supervisor(run)):
        registry.update_run(run.id, pid=os.getpid(), host=this_machine())
        record_supervisor(folder.root, os.getpid())
        submit_job(registry, run, registry_url)


def continue_run(
    registry: Registry,
    run: RunRecord,
    registry_url: str,
    changed: ExperimentSpec | None = None,
    reason: str = RESUMED,
) -> bool:
    """Starts a run again where its launcher puts it: on this machine, or as a job.

    Args:
        changed: the experiment with other ranks, devices or engine; None if it is unchanged.
        reason: is recorded.

    Returns:
        False if the run has been taken over or ended elsewhere since it was read.
    """
    folder = locate_run_folder(run)
    is_job = (changed or load_resolved_spec(folder)).runner.launcher.submits_jobs
    with delay_interrupts():
        with registry.write_atomically():
            status: Status = "queued" if is_job else "submitted"
            if not registry.transition(run.id, {run.status}, status, reason, seen=run):
                return False
            # Before others see the new status, in which the next one would be taken for dead.
            forget_supervisor(folder.root)
        with fail_unless_started(registry, run.id):
            for pid in list_live_ranks(folder.root):  # left by a supervisor that was killed
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            leave_job(registry, run, folder)  # whose state must not count any more
            if changed is not None:
                put_spec(folder, changed)
            _launch_run(registry, run, registry_url, is_job=is_job)
    return True


def _launch_run(registry: Registry, run: RunRecord, registry_url: str, *, is_job: bool) -> None:
    if is_job:
        submit_job(registry, run, registry_url)
    else:
        pid = start_supervisor(run, registry_url)
        registry.update_run(run.id, pid=pid, host=this_machine())


LOOK_INTERVAL = 0.3
"""Seconds between two looks at a run that is watched."""
JOB_QUERY_INTERVAL = 3.0
"""Seconds between two queries of Slurm for a run that is a Slurm job."""


def watch_run(
    run_id: str,
    url: str,
    *,
    show: Callable[[Progress], None] = lambda stage: None,
    timeout: float | None = None,
    clock: Clock = CLOCK,
) -> RunRecord:
    """Waits until a run has ended; records it as lost if its supervisor was killed on this machine.

    Args:
        show: called with what the run is doing.
        timeout: longest wait, in seconds; None waits as long as the run takes.
        clock: the time limit's.

    Raises:
        TimeoutError: the run has not ended in time; it goes on.
    """
    until = None if timeout is None else clock.now() + timeout
    last_query = clock.now()
    with open_registry(url) as registry:
        while True:
            run = registry.run(run_id)
            if clock.now() - last_query > JOB_QUERY_INTERVAL:
                run, last_query = reconcile_job(registry, run), clock.now()
            stage = read_progress(RunFolder(Path(run.directory or "")).progress)
            if stage is not None:
                show(stage)
            if has_lost_supervisor(run):
                run = _record_lost_run(run, url)
            if run.effective_status in ENDED:
                return run
            if until is not None and clock.now() >= until:
                raise TimeoutError(f"{run_id} has not ended: it is {run.effective_status}")
            clock.pause(LOOK_INTERVAL)


def _record_lost_run(run: RunRecord, url: str) -> RunRecord:
    ended = "was killed" if run.status == "running" else "ended before the run had begun"
    with open_registry(url, read_only=False) as registry:
        end_orphaned_run(registry, run, "lost", f"its supervisor, process {run.pid}, {ended}")
        return registry.run(run.id)
