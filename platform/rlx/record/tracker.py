"""Sends runs to the trackers that their experiments name, from a cursor in the registry.

The registry is the truth. It has every metric value in the order of writing, and a cursor of what
each tracker has confirmed, so nothing is lost while a tracker is away: a thread of the supervisor
sends while the run goes on, and `rlx check --repair` later what was missed. No run waits for one.
Every call can be repeated after a crash at any point.
"""

import fcntl
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from rlx.errors import EnvironmentFault
from rlx.plugin import TrackedPoint, TrackedRun, Tracker
from rlx.progress import Report, log_report, print_to_log
from rlx.stopwatch import CLOCK, Clock
from rlx.text import escape_unprintable, redact_passwords, redact_values
from rlx_registry import (
    ENDED,
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    EvaluationRecord,
    MetricRow,
    Registry,
    RunRecord,
)

OUTAGE_TIME_LIMIT = 600.0
"""Seconds to wait for the registry to become available again."""
LONGEST_RETRY_PAUSE = 10.0
"""Maximum seconds between two attempts."""
T = TypeVar("T")


def retry_registry_call(
    ask: Callable[[], T], patience: float = OUTAGE_TIME_LIMIT, clock: Clock = CLOCK
) -> T:
    """Calls `ask`, with retries while the registry is unavailable, for `patience` seconds. A full
    or read-only disk is not retried, because waiting does not fix it."""
    until, pause = clock.now() + patience, 0.25
    while True:
        try:
            return ask()
        except DatabaseUnwritableError:
            raise
        except DatabaseUnavailableError as error:
            if clock.now() > until:
                raise
            if pause == 0.25:
                with suppress(OSError):  # the log's disk may be full
                    print(escape_unprintable(f"waiting for the registry: {error}"), flush=True)
        clock.pause(pause)
        pause = min(2 * pause, LONGEST_RETRY_PAUSE)


KEY_LIMIT, TAG_LIMIT = 250, 5000
"""Maximum characters of a key and a tag, within MLflow's limits, which are the lowest."""
NOT_VARIED = ("name", "seed", "tracking")
"""Sections that have tags of their own, or do not affect results."""


class TrackerUnavailableError(EnvironmentFault):
    """A tracker cannot be reached, or refused. Nothing is lost; the call can be repeated."""


def list_tracker_settings(run: RunRecord) -> dict[str, Mapping[str, Any]]:
    """Returns the settings of the trackers that a run's experiment names, by kind. Imports
    nothing."""
    tracking = run.spec.get("tracking") or {}
    url = tracking.get("mlflow")
    found = [{"kind": "mlflow", "url": url}] if url else []
    return {one["kind"]: one for one in (*found, *(tracking.get("trackers") or ()))}


def open_trackers(run: RunRecord) -> dict[str, Tracker]:
    """Returns the trackers that a run's experiment names, by kind, without connecting to them."""
    return {kind: open_tracker(settings) for kind, settings in list_tracker_settings(run).items()}


def open_tracker(settings: Mapping[str, Any]) -> Tracker:
    """Returns the tracker with these settings; one that fails whenever it is called, if it cannot
    be used here, so that it holds up no other."""
    from rlx.discovery import import_implementation
    from rlx.spec import TRACKERS

    try:
        valid = TRACKERS.validate_section(settings, as_json=True)
        tracker: Tracker = import_implementation(type(valid).implementation)(valid)
    except Exception as error:  # noqa: BLE001  (third-party code; it is told when it is used)
        return _UnusableTracker(settings["kind"], error)
    return tracker


def list_deleting_trackers(run: RunRecord) -> list[str]:
    """Returns the kinds of the trackers that delete a run; the others leave it where it is."""
    trackers = open_trackers(run).items()
    return [kind for kind, one in trackers if type(one).discard is not Tracker.discard]


class _UnusableTracker(Tracker):
    def __init__(self, kind: str, error: Exception) -> None:
        self.title = kind
        super().__init__(error)

    def open_run(self, run: TrackedRun) -> Any:
        raise self.settings

    has_run = open_run


def read_tracked_run(registry: Registry, run_id: str) -> TrackedRun:
    """Reads a run as it is now, with its groups and its evaluations, probes excepted."""
    evaluations = registry.results.evaluations(run_id, with_payload=False)
    plain = [one for one in evaluations if not one.suite.startswith("probe/")]
    record = registry.run(run_id)
    return build_tracked_run(record, registry.queries.groups([record.id])[record.id], plain)


def build_tracked_run(
    record: RunRecord,
    groups: Sequence[str] = (),
    evaluations: Sequence[EvaluationRecord] = (),
) -> TrackedRun:
    """Builds what trackers show of a run."""
    identity = {  # even if several registries share one server
        "rlx.run_id": record.id,
        "rlx.spec_digest": record.digest,
        "rlx.seed": str(record.seed),
        "rlx.created": repr(record.created),
    }
    return TrackedRun(
        id=record.id,
        name=record.name,
        seed=record.seed,
        project=(record.spec.get("tracking") or {}).get("experiment") or record.name,
        attempt=record.attempt,
        status=record.effective_status,
        created=record.created,
        began=record.started,
        ended=record.ended or (record.heartbeat if record.effective_status in ENDED else None),
        settings=redact_values(record.settings),
        yaml=redact_passwords(record.yaml),
        identity=identity,
        tags=identity | _build_tags(record, groups),
        description=_describe_run(record, evaluations),
        groups=tuple(groups),
        folder=Path(record.directory) if record.directory else None,
        ids={name: getattr(record, name) for name in ("mlflow_run_id", "mlflow_experiment_id")},
    )


def make_legal_key(name: str) -> str:
    """Converts a name to one that every tracker accepts: `pass@8` to `pass_at_8`."""
    plain = re.sub(r"[^A-Za-z0-9_\-./ :]", "_", name.replace("@", "_at_"))
    parts = [part for part in plain.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:KEY_LIMIT] or "_"


def _build_tags(record: RunRecord, groups: Sequence[str]) -> dict[str, str]:
    """The other tags of a run, the values that the command line set among them."""
    from rlx.spec.reading import list_leaf_values

    origins = record.origins or {}
    varied = {
        make_legal_key(f"rlx.varied.{path}"): redact_passwords(
            value if isinstance(value, str) else json.dumps(value)
        )
        for path, value in list_leaf_values(record.settings)
        if origins.get(path) in ("--set", "--set (auto)")
        and path.partition(".")[0] not in NOT_VARIED
    }
    tags = {
        **varied,
        "rlx.recipe": record.name,
        "rlx.status": record.effective_status,
        "rlx.attempt": str(record.attempt),
        "rlx.group": ", ".join(groups),
        "rlx.version": str(record.code.get("version") or ""),
        "rlx.commit": str(record.code.get("commit") or ""),
        "rlx.reason": record.reason or "",
    }
    return {name: value[:TAG_LIMIT] for name, value in tags.items() if value}


def _describe_run(run: RunRecord, evaluations: Sequence[EvaluationRecord]) -> str:
    """The run's description in Markdown, with a before/after table of each suite that fits."""
    lines = [
        f"**{run.name}**, seed {run.seed}: rlx run `{run.id}`, spec `{run.digest}`.",
        f"The registry holds the full record: `rlx status {run.id}`, `rlx samples {run.id}`.",
    ]
    for suite in dict.fromkeys(e.suite for e in evaluations):
        named = {e.label: e.metrics for e in evaluations if e.suite == suite}
        ends = [named.get("before", {}), named.get("after", {})]
        table = ["", f"| {suite} | before | after |", "| --- | ---: | ---: |"]
        for name in dict.fromkeys(chain(*ends)):
            values = [end.get(name) for end in ends]
            if any(isinstance(value, int | float) for value in values):
                cells = [f"{v:.4g}" if isinstance(v, int | float) else "" for v in values]
                table.append(f"| {name} | {' | '.join(cells)} |")
        lines += table if len("\n".join([*lines, *table])) <= TAG_LIMIT else ()
    return "\n".join(lines)


def describe_error(tracker: Tracker, error: Exception) -> str:
    """The first line of a tracker's error, after the place where it goes, without passwords."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return escape_unprintable(redact_passwords(f"{tracker.label}: {first}"))


def list_tracker_pages(run: RunRecord) -> dict[str, str]:
    """Returns the addresses or commands that show a run, by kind of tracker but MLflow, which has
    pages of several runs too."""
    others = {k: one for k, one in list_tracker_settings(run).items() if k != "mlflow"}
    if not others:
        return {}
    shown = build_tracked_run(run)
    pages = {kind: open_tracker(one).find_page(shown) for kind, one in others.items()}
    return {kind: page for kind, page in pages.items() if page}


SEND_EVERY = 10.0
"""Seconds between two sendings."""
STEP_WAIT = 60
"""Seconds in which the ranks may take a step before a tracker is imported, which delays them."""
FINAL_TRIES = 3
FINAL_SECONDS = 120.0
"""Seconds after the end of a run in which its remaining records must be sent."""
ROWS_AT_ONCE = 1000
"""Metric values of one call, which is MLflow's limit for a request."""


class RunSender:
    """Sends one run to one tracker. Not thread-safe; any number of processes may send at once.

    Methods raise `TrackerUnavailableError` if the tracker fails, whatever it raises, and
    `rlx_registry.RegistryDatabaseError` if the registry does.
    """

    def __init__(self, registry: Registry, run_id: str, kind: str, tracker: Tracker) -> None:
        self._registry, self.kind, self.tracker = registry, kind, tracker
        self._run_id = registry.run(run_id).id
        self._started: int | None = None  # the attempt that the tracker was told of

    def send(self) -> int:
        """Sends all metrics after the cursor, in order; returns the number of values sent."""
        with self._lock():
            self._start()
            return self._send()

    def finish(self) -> int:
        """Sends the remaining metrics, the files and the end of the run; returns as `send`."""
        with self._lock():
            self._start(again=True)
            changes, more = self._count_changes(), self._list_unreported_metrics()
            sent = self._send(more)
            run = read_tracked_run(self._registry, self._run_id)
            made = self._registry.results.artifacts(self._run_id)
            done, folder = self._get_cursor("-files"), run.folder or Path()
            files = [(folder / one.path, one.path) for one in made if one.seq > done]
            with self._call_tracker():
                self.tracker.finish(run, files)
            self._set_cursor("-files", max((one.seq for one in made), default=0))
            self._set_cursor("-end", changes)
            return sent

    def catch_up(self) -> int:
        """Sends what is missing, and the end of the run if it has ended; returns as `send`."""
        ended = self._registry.run(self._run_id).effective_status in ENDED
        return self.finish() if ended else self.send()

    @property
    def is_behind(self) -> bool:
        """Whether a run has ended but its tracker was not sent the end, a group or metrics: a
        running one is sent by its own supervisor. Reads the registry only."""
        if self._registry.run(self._run_id).effective_status not in ENDED:
            return False
        return self._get_cursor("-end") != self._count_changes() or bool(self._read_rows(1))

    def has_run(self) -> bool:
        """Whether the tracker still has the run, which has ended."""
        with self._call_tracker():
            return self.tracker.has_run(build_tracked_run(self._registry.run(self._run_id)))

    def discard(self) -> None:
        """Deletes the run, as far as the tracker deletes."""
        with self._call_tracker():
            self.tracker.discard(build_tracked_run(self._registry.run(self._run_id)))

    def _start(self, *, again: bool = False) -> None:
        run = read_tracked_run(self._registry, self._run_id)
        if again or self._started != run.attempt:
            self._started = None
            with self._call_tracker():
                has = self.tracker.open_run(run)
            if has is not None:
                for of, seq in (("", has), ("-files", 0), ("-end", 0)):
                    self._set_cursor(of, seq)
            self._started = run.attempt

    def _send(self, more: Sequence[MetricRow] = ()) -> int:
        """Sends the rows after the cursor, and `more`, which has no cursor."""
        sent = 0
        while rows := self._read_rows(ROWS_AT_ONCE) or more:
            points = [
                TrackedPoint(row.seq, make_legal_key(row.name), row.step, row.value, row.at)
                for row in rows
            ]
            with self._call_tracker():
                are_kept = self.tracker.add_points(points)
            if not are_kept:
                self._start(again=True)
                return self._send(more)
            if rows is more:
                break
            self._set_cursor("", rows[-1].seq)
            sent += len(rows)
        return sent

    @contextmanager
    def _call_tracker(self) -> Iterator[None]:
        """Keeps the tracker's ids. Any error means that it may have lost the run."""
        try:
            yield
        except Exception as error:
            self._started = None
            if isinstance(error, TrackerUnavailableError):
                raise
            raise TrackerUnavailableError(describe_error(self.tracker, error)) from error
        finally:
            if ids := self.tracker.ids:
                record = self._registry.run(self._run_id)
                if any(getattr(record, name) != value for name, value in ids.items()):
                    self._registry.update_run(self._run_id, **ids)

    def _list_unreported_metrics(self) -> list[MetricRow]:
        """Figures of evaluations that are not among the run's own metrics."""
        rows = [
            (e.suite, MetricRow(0, f"eval/{e.suite}/{name}", e.step, float(value), e.at))
            for e in self._registry.results.evaluations(self._run_id, with_payload=False)
            if not e.suite.startswith("probe/")
            for name, value in e.metrics.items()
            if isinstance(value, int | float)
        ]
        known = self._registry.results.metrics(self._run_id, names={row.name for _, row in rows})
        reported = {suite for suite, row in rows if row.name in known}
        return [row for suite, row in rows if suite not in reported]

    def _count_changes(self) -> int:
        """Number of status changes and groups, which tells whether an end that was sent is old."""
        changes = self._registry.history(self._run_id)
        return len(changes) + len(self._registry.queries.groups([self._run_id])[self._run_id])

    def _read_rows(self, limit: int) -> list[MetricRow]:
        cursor = self._get_cursor("")
        return self._registry.results.metric_rows_after(self._run_id, cursor, limit)

    def _get_cursor(self, of: str) -> int:
        return self._registry.results.mirror_cursor(self._run_id, f"{self.kind}{of}")

    def _set_cursor(self, of: str, seq: int) -> None:
        self._registry.results.set_mirror_cursor(self._run_id, f"{self.kind}{of}", seq)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lets one process at a time send the run; the lock of a killed one is free."""
        folder = self._registry.run(self._run_id).directory
        if folder is None:
            yield
            return
        with ExitStack() as stack:
            try:
                file = stack.enter_context(Path(folder, f".{self.kind}.lock").open("w"))
            except OSError as error:
                raise TrackerUnavailableError(
                    f"cannot lock {folder} to send it to {self.tracker.title}: {error.strerror}"
                ) from error
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class TrackerThreads:
    """Send a run's records until it has ended and its trackers have all, or stay unreachable.

    One for each tracker, so that one that is away or slow holds up no other. They are daemons, so a
    server that hangs does not keep the supervisor. Ending them at any moment is safe, like a kill.

    Args:
        url: of the registry, without a fencing token: the threads send whatever is recorded.
        trackers: settings of the run's trackers, by kind.
        has_room: false once the disk has been full, on which a tracker's store may be too.
        clock: by which they wait between two tries of the end.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        trackers: Mapping[str, Mapping[str, Any]],
        has_room: Callable[[], bool],
        clock: Clock = CLOCK,
    ) -> None:
        self._url, self._run_id, self._has_room, self._clock = url, run_id, has_room, clock
        self._ended = threading.Event()
        self._left = False
        self._behind: list[str] = []
        self._threads = {
            kind: threading.Thread(target=self._run, args=(kind, settings), name=kind, daemon=True)
            for kind, settings in trackers.items()
        }
        for thread in self._threads.values():
            thread.start()

    def end(self, seconds: float = FINAL_SECONDS) -> str | None:
        """Sends the remaining records, for at most `seconds`; returns what trackers lack."""
        self._ended.set()
        deadline = CLOCK.now() + seconds
        for kind, thread in self._threads.items():
            thread.join(max(0.0, deadline - CLOCK.now()))
            if thread.is_alive():
                self._left = True
                self._behind.append(_describe_missing(kind, f"did not answer in {seconds:g} s"))
                print_to_log(self._behind[-1])
        return "; ".join(self._behind) or None

    def leave(self) -> None:
        """Stops sending: another supervisor has taken over."""
        self._left = True
        self.end()

    def _run(self, kind: str, settings: Mapping[str, Any]) -> None:
        try:
            with retry_registry_call(lambda: Registry.open(self._url)) as registry:
                run = retry_registry_call(lambda: registry.run(self._run_id))
                for _ in range(STEP_WAIT):
                    step = retry_registry_call(lambda: registry.run(self._run_id)).step
                    if step != run.step or self._ended.wait(1.0):
                        break
                sender = RunSender(registry, run.id, kind, open_tracker(settings))
                while not self._ended.wait(SEND_EVERY) and self._has_room():
                    self._try(sender.send)
                self._ended.wait()
                self._finish(kind, sender)
        except Exception as error:  # noqa: BLE001  (reported: a tracker must not end a run)
            why = f"sending to {kind} stopped: {type(error).__name__}: {error}"
            self._behind.append(why)
            print_to_log(why)

    def _try(self, send: Callable[[], int]) -> bool:
        try:
            send()
        except (TrackerUnavailableError, DatabaseUnavailableError) as error:
            print_to_log(f"tracker: {error}")
            return False
        return True

    def _finish(self, kind: str, sender: RunSender) -> None:
        for attempt in range(FINAL_TRIES if self._has_room() else 0):
            if self._left or self._try(sender.catch_up):
                return
            self._clock.pause(2**attempt)
        why = "could not be reached" if self._has_room() else "is out of date: the disk is full"
        self._behind.append(_describe_missing(kind, why))


def _describe_missing(kind: str, why: str) -> str:
    return f"{kind} {why}; the registry is complete, and `rlx check --repair` sends the rest"


def open_senders(registry: Registry, run: RunRecord) -> list[RunSender]:
    """Returns what sends a run to each of its trackers, without connecting to them."""
    return [RunSender(registry, run.id, *tracker) for tracker in open_trackers(run).items()]


def update_trackers(registry: Registry, run: RunRecord, report: Report = log_report) -> None:
    """Sends trackers what was added to a run that has ended; one that has not is sent by its
    supervisor. An unreachable tracker is a warning."""
    if run.status not in ENDED:
        return
    for sender in open_senders(registry, run):
        try:
            sender.finish()
        except TrackerUnavailableError as error:
            why = escape_unprintable(str(error))
            report(f"warning: {sender.kind} was not updated: {why}; the registry has it", err=True)
