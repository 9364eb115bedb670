"""Sends runs to trackers, such as MLflow, from a cursor in the registry.

The registry is the truth. It has every metric value in the order of writing, and a cursor of what
each tracker has confirmed, so nothing is lost while a tracker is away: a thread of the supervisor
sends while the run goes on, and `rlx check --repair` later what was missed. No run waits for one.
Every call can be repeated after a crash at any point.
"""

import fcntl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlx.home import get_rlx_home, tracking_url
from rlx.progress_callbacks import Report, log_report, print_to_log
from rlx.record.mlflow_tracker import MlflowTracker, get_mlflow_uri
from rlx.record.retry import retry_registry_call
from rlx.record.tracker import TrackedRun, Tracker, TrackerUnavailableError
from rlx.stopwatch import CLOCK, Clock
from rlx.text import escape_unprintable
from rlx_registry import (
    ENDED,
    DatabaseUnavailableError,
    MetricRow,
    Registry,
    RunRecord,
)

SEND_EVERY = 10.0
"""Seconds between two sendings."""
STEP_WAIT = 60
"""Seconds in which the ranks may take a step before a tracker is imported, which delays them."""
FINAL_TRIES = 3
FINAL_SECONDS = 120.0
"""Seconds after the end of a run in which its remaining records must be sent."""
ROWS_AT_ONCE = 1000
"""Metric values of one call, which is MLflow's limit for a request."""


def open_trackers(registry: Registry, run: RunRecord) -> list[Tracker]:
    """Returns the trackers that a run's experiment names, without connecting to them."""
    uri = get_mlflow_uri(run)
    if uri is None:
        return []
    return [MlflowTracker(registry, tracking_url(uri), get_rlx_home() / "mlartifacts")]


class RunSender:
    """Sends one run to one tracker. Not thread-safe; any number of processes may send at once.

    Methods raise `TrackerUnavailableError` if the tracker fails, and
    `rlx_registry.RegistryDatabaseError` if the registry does.

    Args:
        registry: open for writing.
        run_id: id of the run.
        tracker: where it is sent.
    """

    def __init__(self, registry: Registry, run_id: str, tracker: Tracker) -> None:
        self._registry, self._tracker = registry, tracker
        self._run_id = registry.run(run_id).id
        self._started: int | None = None  # the attempt that the tracker was told of

    def send(self) -> int:
        """Sends all metrics after the cursor, in order; returns the number of values sent."""
        with self._lock():
            return self._send(self._start())

    def finish(self) -> int:
        """Sends the remaining metrics, the files and the end of the run; returns as `send`."""
        with self._lock():
            run = self._start(again=True)
            changes, more = self._count_changes(), self._list_unreported_metrics(run)
            sent = self._send(run, more)
            files = self._list_new_files()
            self._tracker.finish(TrackedRun.read(self._registry, self._run_id), files)
            self._set_cursor("files", self._count_files())
            self._set_cursor("end", changes)
            return sent

    def catch_up(self) -> int:
        """Sends what is missing, and the end of the run if it has ended; returns as `send`."""
        ended = self._registry.run(self._run_id).effective_status in ENDED
        return self.finish() if ended else self.send()

    @property
    def is_behind(self) -> bool:
        """Whether a run has ended but its tracker was not sent the end, a group or metrics.

        A running run is sent by its own supervisor, so it is never behind. Reads the registry only.
        """
        run = self._registry.run(self._run_id)
        if run.effective_status not in ENDED:
            return False
        if self._get_cursor("end") != self._count_changes():
            return True
        return bool(self._read_rows(1))

    def _start(self, *, again: bool = False) -> TrackedRun:
        run = TrackedRun.read(self._registry, self._run_id)
        if again or self._started != run.record.attempt:
            self._started = None
            if self._tracker.start(run):
                for cursor in ("", "files", "end"):
                    self._set_cursor(cursor, 0)
            self._started = run.record.attempt
        return run

    def _send(self, run: TrackedRun, more: Sequence[MetricRow] = ()) -> int:
        """Sends the rows after the cursor, and `more`, which has no cursor."""
        try:
            sent = 0
            while rows := self._read_rows(ROWS_AT_ONCE):
                if not self._tracker.add_metrics(rows):
                    return self._send(self._start(again=True), more)
                self._set_cursor("", rows[-1].seq)
                sent += len(rows)
            if more and not self._tracker.add_metrics(more):
                return self._send(self._start(again=True), more)
        except TrackerUnavailableError:
            self._started = None  # the tracker may have lost the run
            raise
        return sent

    def _list_unreported_metrics(self, run: TrackedRun) -> list[MetricRow]:
        """Figures of evaluations that are not among the run's own metrics."""
        rows = [
            (e.suite, MetricRow(0, f"eval/{e.suite}/{name}", e.step, float(value), e.at))
            for e in run.evaluations
            for name, value in e.metrics.items()
            if isinstance(value, int | float)
        ]
        known = self._registry.results.metrics(self._run_id, names={row.name for _, row in rows})
        reported = {suite for suite, row in rows if row.name in known}
        return [row for suite, row in rows if suite not in reported]

    def _list_new_files(self) -> list[tuple[Path, str]]:
        done, folder = self._get_cursor("files"), self._registry.run(self._run_id).directory
        new = [one for one in self._registry.results.artifacts(self._run_id) if one.seq > done]
        return [(Path(folder or "") / one.path, one.path) for one in new]

    def _count_files(self) -> int:
        return max((one.seq for one in self._registry.results.artifacts(self._run_id)), default=0)

    def _count_changes(self) -> int:
        """Number of status changes and groups, which tells whether an end that was sent is old."""
        changes = self._registry.history(self._run_id)
        return len(changes) + len(self._registry.list_run_groups(self._run_id))

    def _read_rows(self, limit: int) -> list[MetricRow]:
        cursor = self._get_cursor("")
        return self._registry.results.metric_rows_after(self._run_id, cursor, limit)

    def _get_cursor(self, of: str) -> int:
        return self._registry.results.mirror_cursor(self._run_id, self._name_cursor(of))

    def _set_cursor(self, of: str, seq: int) -> None:
        self._registry.results.set_mirror_cursor(self._run_id, self._name_cursor(of), seq)

    def _name_cursor(self, of: str) -> str:
        return f"{self._tracker.name}-{of}" if of else self._tracker.name

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lets one process at a time send the run; the lock of a killed one is free."""
        folder = self._registry.run(self._run_id).directory
        if folder is None:
            yield
            return
        with ExitStack() as stack:
            try:
                file = stack.enter_context(Path(folder, ".tracker.lock").open("w"))
            except OSError as error:
                raise TrackerUnavailableError(
                    f"cannot lock {folder} to send it to {self._tracker.name}: {error.strerror}"
                ) from error
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class TrackerThread:
    """Sends a run's records until it has ended and its trackers have all, or stay unreachable.

    A daemon thread, so a server that hangs does not keep the supervisor. Ending it at any moment is
    safe, like a kill: the cursor in the registry follows what a tracker has confirmed.

    Args:
        url: of the registry, without a fencing token: the thread sends whatever is recorded.
        run_id: id of the run.
        has_room: false once the disk has been full, on which a tracker's store may be too.
        clock: by which it waits between two tries of the end.
    """

    def __init__(
        self, url: str, run_id: str, has_room: Callable[[], bool], clock: Clock = CLOCK
    ) -> None:
        self._url, self._run_id, self._has_room, self._clock = url, run_id, has_room, clock
        self._ended = threading.Event()
        self._left = False
        self._behind: list[str] = []
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()

    def end(self, seconds: float = FINAL_SECONDS) -> str | None:
        """Sends the remaining records, for at most `seconds`; returns what trackers lack."""
        self._ended.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._left = True
            self._behind.append(_describe_missing("A tracker", f"did not answer in {seconds:g} s"))
            print_to_log(self._behind[-1])
        return "; ".join(self._behind) or None

    def leave(self) -> None:
        """Stops sending: another supervisor has taken over."""
        self._left = True
        self._ended.set()
        self._thread.join(FINAL_SECONDS)

    def _run(self) -> None:
        try:
            with retry_registry_call(lambda: Registry.open(self._url)) as registry:
                run = retry_registry_call(lambda: registry.run(self._run_id))
                trackers = open_trackers(registry, run)
                senders = {one.name: RunSender(registry, run.id, one) for one in trackers}
                if senders:
                    self._await_step(registry, run.step)
                while senders and not self._ended.wait(SEND_EVERY) and self._has_room():
                    for sender in senders.values():
                        self._try(sender.send)
                self._ended.wait()
                for name, sender in senders.items():
                    self._finish(name, sender)
        except Exception as error:  # noqa: BLE001  (reported: a tracker must not end a run)
            self._behind.append(f"sending to trackers stopped: {type(error).__name__}: {error}")
            print_to_log(self._behind[-1])

    def _await_step(self, registry: Registry, first: int) -> None:
        """Waits until the ranks train, or the run has ended, but at most `STEP_WAIT`."""
        for _ in range(STEP_WAIT):
            step = retry_registry_call(lambda: registry.run(self._run_id)).step
            if step != first or self._ended.wait(1.0):
                return

    def _try(self, send: Callable[[], int]) -> bool:
        try:
            send()
        except (TrackerUnavailableError, DatabaseUnavailableError) as error:
            print_to_log(f"tracker: {error}")
            return False
        return True

    def _finish(self, name: str, sender: RunSender) -> None:
        for attempt in range(FINAL_TRIES if self._has_room() else 0):
            if self._left or self._try(sender.catch_up):
                return
            self._clock.pause(2**attempt)
        why = "could not be reached" if self._has_room() else "is out of date: the disk is full"
        self._behind.append(_describe_missing(name, why))


def _describe_missing(name: str, why: str) -> str:
    return f"{name} {why}; the registry is complete, and `rlx check --repair` sends the rest"


def update_trackers(registry: Registry, run: RunRecord, report: Report = log_report) -> None:
    """Sends trackers what was added to a run that has ended.

    A run that has not ended is sent by its supervisor. If a tracker is unreachable, a warning is
    reported; the registry keeps the records.
    """
    if run.status not in ENDED:
        return
    for tracker in open_trackers(registry, run):
        try:
            RunSender(registry, run.id, tracker).finish()
        except TrackerUnavailableError as error:
            why = escape_unprintable(str(error))
            report(f"warning: {tracker.name} was not updated: {why}; the registry has it", err=True)
