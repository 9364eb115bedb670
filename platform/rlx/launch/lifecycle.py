"""The life of a run outside of its supervisor: recorded, started, resumed, stopped, watched.

A run is "queued" until somebody starts it, or its job system; "submitted" once its supervisor is
started, which waits for devices; "running" under a live supervisor; then "finished", "failed" or
"stopped". It is "lost" when its supervisor is gone, and `continue_run` brings any run that has not
finished back to "submitted" or "queued". The supervisor makes the changes from "submitted" on.

A run's folder is complete before the run is recorded, in one transaction: a submission that is
killed leaves either no run, or one that can be resumed.
"""

import errno
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import rlx
from rlx.checkpoint import copy_origin, pin_checkpoint
from rlx.discovery import ExperimentPlugins, list_plugin_records
from rlx.errors import EnvironmentFault, RlxError, SpecError
from rlx.home import REGISTRY, RunFolder, get_rlx_home, tracking_url
from rlx.importing import source_digest
from rlx.launch.launcher import cancel_job, leave_job, reconcile_job, submit_job
from rlx.launch.machine import build_device_request, find_version
from rlx.launch.processes import (
    child_environment,
    delay_interrupts,
    has_ended,
    has_lost_supervisor,
    is_abandoned,
    is_job,
    is_supervisor,
    signal_ranks,
    this_machine,
)
from rlx.launch.run_access import (
    BROKEN_OFF,
    KILLED,
    attempts_used,
    end_orphaned_run,
    fail_unless_started,
    find_runs,
    is_spec_of_run,
    load_resolved_spec,
    locate_run_folder,
    open_registry,
    put_spec,
)
from rlx.model import choose_run_vocabulary
from rlx.plugin_files import keep_for_runs
from rlx.progress import Progress, Report, log_report, read_progress
from rlx.spec import ExperimentSpec, TrackingSpec
from rlx.spec.reading import LoadedSpec
from rlx.stopwatch import CLOCK, Clock
from rlx.text import escape_unprintable
from rlx_registry import (
    BLOCKING,
    ENDED,
    RESUMED,
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    NotFoundError,
    Registry,
    RunRecord,
    Status,
    find_changed_plugins,
    forget_supervisor,
    record_supervisor,
)

UNRECORDED = ".unrecorded-"
"""Name prefix of folders of runs that are not recorded yet, or were never recorded."""
PACKAGES = ("torch", "deepspeed", "transformers", "mlflow", "sqlalchemy", "pydantic", "numpy")


def submit_run(
    registry: Registry,
    read: LoadedSpec,
    plugins: ExperimentPlugins,
    *,
    again: bool,
    queue: bool = False,
    anyway: bool = False,
) -> tuple[RunRecord, bool]:
    """Creates a run's folder and records the run, without starting it.

    Args:
        again: submit even if an identical run has finished or is active. A run under another name,
            or whose plugins were others, is not identical.
        queue: leave the run to whoever starts it.
        anyway: train even where the first contact of a pretrained model shows no signal.

    Returns:
        The run, or the identical one, and whether it is new.

    Raises:
        InvalidSpec: the checkpoint to start from is missing, damaged, or of another model.
    """
    read = pin_checkpoint(registry, read)
    spec = read.spec
    runs = get_rlx_home() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    submission: dict[str, Any] = {
        "digest": plugins.compute_digest(spec),
        "seed": spec.seed,
        "name": spec.name,
        "spec": spec.dump_resolved(),
        "yaml": read.document.text,
        "plugins": list_plugin_records(spec, plugins),
        "code": collect_code_version(),
        "environment": collect_environment_versions(),
        "again": again,
        "queue": queue,
    }
    keep_for_runs(submission["spec"])
    prefix = f"{UNRECORDED}{this_machine()}-"
    for folder in runs.glob(f"{prefix}*"):  # of submissions that were killed
        if has_ended(int(folder.name.removeprefix(prefix).partition("-")[0])):
            shutil.rmtree(folder, ignore_errors=True)
    prefix += f"{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=runs, prefix=prefix, ignore_cleanup_errors=True) as aside:
        staged = RunFolder(Path(aside) / "run")
        staged.root.mkdir()
        if (vocabulary := choose_run_vocabulary(spec, plugins)) is not None:
            vocabulary.save(staged.tokenizer)
        staged.yaml.write_text(read.document.text)
        copy_origin(registry, spec, staged)
        put_spec(staged, spec)
        if anyway:
            staged.anyway.touch()
        with registry.write_atomically():
            run, created = registry.submit(**submission)
            if created:
                _record_folder(registry, run, read, _place_folder(staged.root, runs, run.id))
                for found in plugins.warnings:
                    registry.results.add_event(
                        run.id, "warning", found.message, found.to_json(), "warning"
                    )
    if anyway and not created and run.directory is not None and run.status not in ENDED:
        RunFolder(Path(run.directory)).anyway.touch()
    return registry.run(run.id), created


def describe_new_run(registry: Registry, run: RunRecord) -> str | None:
    """Why a run is new although an earlier one that counts has its spec and seed, or None."""
    earlier = [
        (find_changed_plugins(run.plugins, other.plugins), other)
        for other in registry.runs(digest=run.digest)
        if other.id != run.id and other.seed == run.seed and other.effective_status in BLOCKING
    ]
    if not earlier:
        return None
    changed, nearest = min(earlier, key=lambda pair: bool(pair[0]))
    if changed:
        return f"{', '.join(changed)} changed since {nearest.id}"
    if run.name != nearest.name:
        return f"{nearest.id} is the same experiment under the name {nearest.name}"
    return None


def _record_folder(registry: Registry, run: RunRecord, read: LoadedSpec, folder: RunFolder) -> None:
    is_job = read.spec.runner.launcher.submits_jobs
    starter: dict[str, str | int] = {}
    if is_job or run.status == "submitted":  # until it is started, the run is this process's
        starter = {"pid": os.getpid(), "host": this_machine()}
        record_supervisor(folder.root, os.getpid())
    steps, origins = read.spec.steps, read.origins
    registry.update_run(
        run.id, directory=folder.root, steps_total=steps, origins=origins, **starter
    )
    for file in (folder.yaml, folder.resolved_spec):
        registry.results.add_artifact(run.id, file, "spec")
    for file in sorted(folder.tokenizer.glob("*.json")):
        registry.results.add_artifact(run.id, file, "tokenizer")


def _place_folder(staged: Path, runs: Path, run_id: str) -> RunFolder:
    """Renames a folder to one that no run uses, not even of another registry or a deleted one."""
    for number in count(1):
        folder = runs / (run_id if number == 1 else f"{run_id}.{number}")
        try:
            return RunFolder(staged.replace(folder))  # takes the place of an empty folder too
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
    raise AssertionError("there is always another number")


def start_supervisor(run: RunRecord, registry_url: str) -> int:
    """Starts the supervisor in its own session, so that it outlives the terminal.

    Returns:
        Its process id.
    """
    folder = locate_run_folder(run)
    with folder.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlx.launch.supervisor", run.id],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**child_environment(), REGISTRY: registry_url},
        )
    record_supervisor(folder.root, process.pid)
    return process.pid


def collect_environment_versions() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: find_version(name) for name in PACKAGES},
    }


def collect_code_version() -> dict[str, Any]:
    """rlx's version, a digest of its sources, and its commit if it runs from a checkout."""
    root, described = Path(rlx.__file__).parent, ""
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    with suppress(FileNotFoundError):  # there is no git
        described = subprocess.run(
            ["git", "-C", str(root), *describe],
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        ).stdout.strip()
    return {
        "version": rlx.__version__,
        "sources": source_digest(root / "__init__.py")[:16],
        "commit": described.removesuffix("-dirty") or None,
        "modified": described.endswith("-dirty"),
    }


def registry_url(read: LoadedSpec) -> str:
    """URL of the experiment's registry: the spec's, or RLX_REGISTRY if the spec has the default."""
    written = read.spec.tracking.registry
    is_default = written == TrackingSpec().registry
    return tracking_url(os.environ.get("RLX_REGISTRY") or written if is_default else written)


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
    `queue` leaves it to others."""
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
            signal_ranks(folder.root, signal.SIGKILL)  # left by a supervisor that was killed
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

    Raises:
        TimeoutError: the run has not ended in `timeout` seconds; it goes on.
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
                ended = (
                    "was killed" if run.status == "running" else "ended before the run had begun"
                )
                reason = f"its supervisor, process {run.pid}, {ended}"
                with open_registry(url, read_only=False) as writing:
                    end_orphaned_run(writing, run, "lost", reason)
                    run = writing.run(run.id)
            if run.effective_status in ENDED:
                return run
            if until is not None and clock.now() >= until:
                raise TimeoutError(f"{run_id} has not ended: it is {run.effective_status}")
            clock.pause(LOOK_INTERVAL)


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

    A run that is started waits for its devices by itself. Jobs are only waited for. `report` gets
    why a run is skipped, once; `look` is called about once a second, and before the first start.
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
