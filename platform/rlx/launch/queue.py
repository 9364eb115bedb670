"""The queue of a registry: starts queued runs, oldest first, and takes over lost ones."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from rlx.errors import EnvironmentFault, RlxError
from rlx.launch.devices import build_device_request
from rlx.launch.launcher import reconcile_job
from rlx.launch.processes import (
    has_lost_supervisor,
    is_job,
    is_supervised,
    is_supervisor,
    this_machine,
)
from rlx.launch.run_access import find_runs, is_spec_of_run, load_resolved_spec, locate_run_folder
from rlx.launch.start_stop import attempts_used, take_over_run
from rlx.progress import Report, log_report
from rlx.spec import ExperimentSpec
from rlx.stopwatch import CLOCK, Clock, Stopwatch
from rlx.text import escape_unprintable
from rlx_registry import (
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    NotFoundError,
    Registry,
    RunRecord,
)

QUEUE_CHECK_INTERVAL = 1.0
"""Seconds between two checks of the queue."""
ALIVE = {"submitted", "running"}
DONE = {"finished", "failed", "stopped"}
SILENCE_OF_LOST_RUN = 25.0
"""Seconds without a heartbeat after which a run counts as lost: a live supervisor sends two."""


def run_queue(
    registry: Registry,
    url: str,
    limit: int,
    *,
    once: bool,
    only: Collection[str] | None = None,
    report: Report = log_report,
    look: Callable[[], None] = lambda: None,
    clock: Clock = CLOCK,
) -> None:
    """Starts queued and lost runs in a loop.

    A run that has ended is not counted any more, even while its supervisor still tells MLflow.

    Args:
        registry: open for writing.
        url: URL of the registry, for supervisors.
        limit: number of runs at a time.
        once: return when nothing is left to do and all supervisors started here have exited.
        only: ids of the runs to take; `once` then also waits for those that others run.
        report: called with each run that is taken, and once with why another is skipped.
        look: called about once a second, and before the first run is taken.
        clock: by which silent runs are watched.
    """
    queue = _Queue(registry, only, report, clock)
    mine: dict[str, int] = {}
    while True:
        mine = {run: pid for run, pid in mine.items() if is_supervisor(pid, run)}
        free = False
        try:
            look()
            free = sum(run.status not in DONE for run in find_runs(registry, mine)) < limit
            taken = next(queue.list_fitting_runs(set(mine)), None) if free else None
            pid = None if taken is None else queue.start_queued_run(taken, url)
            over = not mine and taken is None and not queue.is_watching and not queue.is_busy()
        except DatabaseUnwritableError:
            raise
        except DatabaseUnavailableError as error:  # it may recover
            report(f"waiting for the registry: {escape_unprintable(str(error))}", err=True)
            clock.pause(SILENCE_OF_LOST_RUN)
            continue
        if taken is not None and pid is not None:
            mine[taken.id] = pid
            report(f"{taken.id} {taken.name}  seed {taken.seed}: {_describe_takeover(taken)}")
        elif once and free and over:
            return
        else:
            clock.pause(QUEUE_CHECK_INTERVAL)


def _describe_takeover(run: RunRecord) -> str:
    return "taken from the queue" if run.status == "queued" else "taken over"


def _is_live_job(run: RunRecord) -> bool:
    """Whether a run is a job that has not ended, as far as the registry knows."""
    return run.status in ("queued", *ALIVE) and is_job(run)


@dataclass(frozen=True, slots=True)
class _Watch:
    """A run that is silent by the clock of this machine.

    Attributes:
        heartbeat: its last heartbeat.
        has_beaten: whether that came while it was watched.
        silence: time since then, as this process saw it pass.
    """

    heartbeat: float | None
    has_beaten: bool
    silence: Stopwatch


class _Queue:
    """Runs that can be started, oldest first; reports once why a run is skipped."""

    def __init__(
        self, registry: Registry, only: Collection[str] | None, report: Report, clock: Clock
    ) -> None:
        self._registry, self._only, self._report = registry, only, report
        self._clock = clock
        self._reported: set[tuple[str, str]] = set()
        self._watched: dict[str, _Watch] = {}
        self._turn = 0

    @property
    def is_watching(self) -> bool:
        """Whether some silent run may turn out to be lost."""
        return not all(watch.has_beaten for watch in self._watched.values())

    def list_fitting_runs(self, mine: set[str]) -> Iterator[RunRecord]:
        """Yields the runs that this machine can start now.

        A run that waits for devices blocks later runs that need devices.
        """
        here = this_machine()
        held = {device.name for device in self._registry.devices(here)}
        full = False
        for run in self._waiting(mine):
            try:
                # `rlx resume --set` may have changed the one in the run's folder.
                spec = load_resolved_spec(locate_run_folder(run))
                if not is_spec_of_run(spec, run):
                    raise EnvironmentFault("the folder here belongs to another registry's run")
                if spec.runner.launcher.submits_jobs and self._only is not None:
                    self._watched.pop(run.id, None)
                    continue  # its job was submitted with the group, and `is_busy` asks about it
                if spec.runner.launcher.submits_jobs:
                    raise EnvironmentFault(f"it is a job of {spec.runner.launcher.kind}")
                self._require_attempts(run, spec)
                wanted = build_device_request(spec)
            except FileNotFoundError:
                self.report_once(run.id, "its folder is not on this machine")
                continue
            except (ValueError, OSError, RlxError) as error:
                self.report_once(run.id, escape_unprintable(str(error).splitlines()[0]))
                continue
            if wanted is None or (not full and len(set(wanted.names) - held) >= wanted.count):
                yield run
            else:
                full = True

    def is_busy(self) -> bool:
        """Returns whether any run of `only` is alive, or is a job; False without `only`.

        Asks the job system about one of them per call, in turn.
        """
        runs = find_runs(self._registry, self._only or ())
        busy = [run for run in runs if run.effective_status in ALIVE or _is_live_job(run)]
        if busy:
            self._turn += 1
            reconcile_job(self._registry, busy[self._turn % len(busy)])
        return bool(busy)

    def start_queued_run(self, run: RunRecord, url: str) -> int | None:
        """Starts the supervisor of a run; returns its process id.

        Returns None if another process has taken the run, or if it cannot be started; the failure
        is recorded and reported.
        """
        try:
            return take_over_run(self._registry, run, url, _describe_takeover(run))
        except (OSError, RlxError) as error:
            self.report_once(run.id, escape_unprintable(str(error)))
        except NotFoundError:
            self.report_once(run.id, "it has just been removed")
        return None

    def _require_attempts(self, run: RunRecord, spec: ExperimentSpec) -> None:
        if run.status == "queued":
            return
        if run.request is not None:
            self._registry.transition(run.id, {run.status}, "stopped", "stopped on request")
            raise EnvironmentFault("it was asked to stop")
        used = attempts_used(self._registry, run.id)
        if used >= spec.runner.max_attempts:
            raise EnvironmentFault(f"it is lost after {used} attempts")

    def _waiting(self, mine: set[str]) -> Iterator[RunRecord]:
        found = [
            run
            for status in ("lost", "running", "submitted", "queued")
            for run in self._registry.runs(statuses=[status])
            if run.id not in mine
            and (self._only is None or run.id in self._only)
            and (status == "queued" or self._is_lost(run))
        ]
        return iter(sorted(found, key=lambda run: run.created))

    def _is_lost(self, run: RunRecord) -> bool:
        """Returns whether no supervisor runs it; a silent run is watched for a while first.

        After an outage of the registry or a sleep of this machine, no run has a recent heartbeat.
        Where the clock of a run's machine is behind this one, it never has: a heartbeat that
        changes is a sign of life, whatever its time.
        """
        if run.status == "lost":
            return True
        if has_lost_supervisor(run):
            return True
        is_here = run.host == this_machine() and is_supervised(run)
        if is_here or run.effective_status != "lost":
            self._watched.pop(run.id, None)
            return False
        watch = self._watched.get(run.id)
        if watch is None or watch.heartbeat != run.heartbeat:
            silence = Stopwatch(4 * QUEUE_CHECK_INTERVAL, self._clock.now)
            watch = _Watch(run.heartbeat, watch is not None, silence)
            self._watched[run.id] = watch
        return watch.silence.look() > SILENCE_OF_LOST_RUN

    def report_once(self, what: str, why: str) -> None:
        """Prints why something is skipped, once per reason."""
        if (what, why) not in self._reported:
            self._reported.add((what, why))
            self._report(f"{what} skipped: {why}", err=True)
