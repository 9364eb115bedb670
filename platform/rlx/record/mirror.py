"""The MLflow mirror: what the registry knows of a run, shown in MLflow.

The registry is the truth. It keeps every metric in the order of writing, and a cursor that says how
far MLflow has been told, so a tracker that is down loses nothing: the rows wait. Every method here
may be called again after a crash between any two lines of it, and by two processes at once.

* What is sent twice arrives once: MLflow drops a metric whose key, step, timestamp and value it
  already has, and timestamps are the registry's.
* MLflow cannot change a value. Where a resumed run has taken a step again, the MLflow run holds
  values that the registry holds no more: it goes into MLflow's bin, and a new one is told all.
* A run is found again by its tags, even when the crash came before the registry heard of it; one
  that was made twice, because the answer to the first request was lost, is made one again.
* MLflow is told a run's status explicitly; left to itself it shows killed runs as running for ever.
"""

import fcntl
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rlx.record.mlflow_client import (
    MetricPoint,
    MirrorClient,
    MirrorUnavailableError,
    MlflowRun,
    build_metric_point,
)
from rlx.record.mlflow_tags import (
    TAG_LIMIT,
    build_identity_tags,
    build_run_tags,
    flat_params,
    legal_key,
    select_scalar_metrics,
)
from rlx.text import redact_passwords
from rlx_registry import EvaluationRecord, MetricRow, Registry, RunRecord

__all__ = ["MirrorUnavailableError", "MlflowMirror", "is_mirror_behind"]

TARGET = "mlflow"
"""Name of the metrics' cursor in the registry; files and the end have cursors of their own."""

_FILES = "mlflow-files"
_END = "mlflow-end"  # counts the changes of status that MLflow knew when it was told of an end
_PAGE = 1000  # MLflow's own limit for one request

_STATUS = {
    "queued": "SCHEDULED",
    "submitted": "RUNNING",
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "lost": "FAILED",
    "stopped": "KILLED",
}
_ENDS = ("finished", "failed", "lost", "stopped")


class _OpenMlflowRun(NamedTuple):
    """The MLflow run that an attempt is told to."""

    client: MirrorClient
    id: str
    attempt: int
    points: "_MlflowPoints"


class MlflowMirror:
    """Keeps one run's MLflow run in step with the registry. Not for several threads at once.

    Every method raises `MirrorDown` when MLflow fails, and `rlx_registry.RegistryError` when the
    registry does.

    Args:
        registry: open for writing.
        run_id: the run, as the registry calls it.
        uri: MLflow's tracking URI: `sqlite:///path`, or `http://host:port`.
        artifact_root: folder under which each experiment has one for its files; None leaves the
            place to the tracking server.
    """

    def __init__(
        self, registry: Registry, run_id: str, uri: str, artifact_root: Path | str | None
    ) -> None:
        self._registry = registry
        self._run_id = registry.run(run_id).id
        self._uri = uri
        self._artifact_root = artifact_root
        self._known: _OpenMlflowRun | None = None

    def begin(self) -> None:
        """Finds or makes the MLflow run, and tells it parameters, tags, status and the spec.

        The first one to use an SQLite store also makes it, which takes seconds; others wait. Runs
        of this registry that MLflow shows as running, though they have ended, are ended there too.
        """
        self._known = None
        with self._ensure_open_run() as at:
            self._correct_other_runs(at.client)

    def deliver(self) -> int:
        """Sends the metrics that MLflow has not been told, in order, as many as a request takes.

        Returns:
            How many values were sent.
        """
        with self._ensure_open_run() as at:
            self._correct_status(at)
            return self._deliver(at)[1]

    def finish(self, status: str) -> int:
        """Sends whatever is left, uploads the artifacts, and ends the MLflow run.

        Args:
            status: how the run ended, in the registry's words: "finished", "failed", "lost"
                (both FAILED in MLflow) or "stopped" (KILLED).

        Returns:
            How many values were sent.

        Raises:
            ValueError: no such end.
        """
        if status not in _ENDS:
            raise ValueError(f"a run ends as one of {', '.join(_ENDS)}, not {status!r}")
        self._known = None  # runs made twice may have come to light since
        with self._ensure_open_run() as at:
            changes = len(self._registry.history(self._run_id))
            run = self._registry.run(self._run_id)
            evaluations = _list_suite_evaluations(self._registry, self._run_id)
            at, sent = self._deliver(at, self._find_unreported_metrics(evaluations))
            missing = self._upload(at, run)
            tags = {**build_run_tags(run, evaluations), "rlx.status": status}
            tags |= {"rlx.missing_artifacts": ", ".join(missing)[:TAG_LIMIT]} if missing else {}
            at.client.describe(at.id, {}, tags)
            at.client.set_status(at.id, _STATUS[status], _get_end_time(run))
            self._registry.results.set_mirror_cursor(self._run_id, _END, changes)
        return sent

    def catch_up(self) -> int:
        """Delivers, and tells how the run ended where it has.

        Returns:
            How many values were sent.
        """
        status = self._registry.run(self._run_id).effective_status
        return self.finish(status) if status in _ENDS else self.deliver()

    # Finding the MLflow run ------------------------------------------------------------------

    @contextmanager
    def _ensure_open_run(self) -> Iterator[_OpenMlflowRun]:
        """The MLflow run of this attempt; looked for anew once MLflow has been away."""
        try:
            run, known = self._registry.run(self._run_id), self._known
            if known is None or (known.attempt, known.id) != (run.attempt, run.mlflow_run_id):
                self._known = known = self._open()
            yield known
        except MirrorUnavailableError:
            self._known = None
            raise

    def _open(self) -> _OpenMlflowRun:
        with _hold_mirror_lock(self._uri, self._registry.run(self._run_id)):
            run = self._registry.run(self._run_id)
            client = MirrorClient(self._uri)
            experiment_id = self._experiment(client, run.name)
            shown = self._find_or_create_run(client, run, experiment_id)
            if shown.id != run.mlflow_run_id:
                self._record_mlflow_ids(shown.id, experiment_id)
        tags = build_run_tags(run, _list_suite_evaluations(self._registry, run.id))
        client.describe(shown.id, flat_params(run.spec), tags)
        client.write_text(shown.id, redact_passwords(run.yaml), "spec.yaml")
        resolved = redact_passwords(json.dumps(run.spec, indent=2))
        client.write_text(shown.id, resolved, "spec.resolved.json")
        client.set_status(shown.id, _STATUS[run.effective_status], _get_end_time(run))
        return _OpenMlflowRun(client, shown.id, run.attempt, _MlflowPoints(client, shown))

    def _experiment(self, client: MirrorClient, name: str) -> str:
        root = self._artifact_root
        if root is None:
            return client.experiment(name, None)
        if "://" in str(root):
            return client.experiment(name, f"{str(root).rstrip('/')}/{name}")
        return client.experiment(name, (Path(root).absolute() / name).as_uri())

    def _find_or_create_run(
        self, client: MirrorClient, run: RunRecord, experiment_id: str
    ) -> MlflowRun:
        """The run in MLflow, made where there is none; others that are the same go."""
        noted = None if run.mlflow_run_id is None else client.find(run.mlflow_run_id)
        if noted is None and not client.list_tagged_runs(experiment_id, build_identity_tags(run)):
            name = f"{run.name} seed {run.seed} ({run.id})"
            client.create_run(
                experiment_id, name, run.started or run.created, build_identity_tags(run)
            )
        # Looked for even when just made: a request that was answered too late was sent twice.
        same = client.list_tagged_runs(experiment_id, build_identity_tags(run))
        kept = noted or same[0]
        for shown in same:
            if shown.id != kept.id:
                client.discard(shown.id)
        return kept

    def _record_mlflow_ids(self, mlflow_run_id: str, experiment_id: str) -> None:
        # A run that is new has been told nothing. The cursors go first: were the run noted first,
        # a crash in between would skip what the lost one had.
        for cursor in (TARGET, _FILES, _END):
            self._registry.results.set_mirror_cursor(self._run_id, cursor, 0)
        self._registry.update_run(
            self._run_id, mlflow_run_id=mlflow_run_id, mlflow_experiment_id=experiment_id
        )

    # Telling ---------------------------------------------------------------------------------

    def _deliver(
        self, at: _OpenMlflowRun, more: Sequence[MetricRow] = ()
    ) -> tuple[_OpenMlflowRun, int]:
        """Sends what is left of the metrics, and `more`.

        Returns:
            The MLflow run that has them now, and how many of the metrics were sent.
        """
        cursor = self._registry.results.mirror_cursor(self._run_id, TARGET)
        sent = 0
        while rows := self._registry.results.metric_rows_after(self._run_id, cursor, _PAGE):
            if at.points.has_conflict([*rows, *more]):
                return self._deliver(self._recreate_mlflow_run(at), more)
            at.client.write_metrics(at.id, rows)
            at.points.add(rows)
            cursor = rows[-1].seq
            self._registry.results.set_mirror_cursor(self._run_id, TARGET, cursor)
            sent += len(rows)
        if at.points.has_conflict(more):
            return self._deliver(self._recreate_mlflow_run(at), more)
        if more:
            at.client.write_metrics(at.id, list(more))
        return at, sent

    def _recreate_mlflow_run(self, at: _OpenMlflowRun) -> _OpenMlflowRun:
        """Puts the MLflow run into the bin and makes a new one, which is told everything."""
        run = self._registry.run(self._run_id)
        with _hold_mirror_lock(self._uri, run):
            if self._registry.run(self._run_id).mlflow_run_id == at.id:
                at.client.discard(at.id)
                self._registry.update_run(self._run_id, mlflow_run_id=None)
        self._known = self._open()
        return self._known

    def _correct_status(self, at: _OpenMlflowRun) -> None:
        """Shows a run that was silent, and taken for lost, as what it is."""
        run = self._registry.run(self._run_id)
        shown, status = at.client.find(at.id), _STATUS[run.effective_status]
        if shown is None:
            raise MirrorUnavailableError(
                f"MLflow at {redact_passwords(self._uri)} has lost run {at.id}"
            )
        if shown.status != status:
            at.client.set_status(at.id, status, _get_end_time(run))

    def _correct_other_runs(self, client: MirrorClient) -> None:
        """Ends every run that MLflow shows as running where the registry knows of its end."""
        with suppress(
            MirrorUnavailableError
        ):  # theirs may wait, and are no reason to hold up this one
            for shown in client.running():
                self._correct_shown_run(client, shown)

    def _correct_shown_run(self, client: MirrorClient, shown: MlflowRun) -> None:
        with suppress(LookupError):  # another registry's run, or one that is not there
            run = self._registry.run(shown.tags.get("rlx.run_id", ""))
            status = _STATUS[run.effective_status]
            if status != "RUNNING" and build_identity_tags(run).items() <= shown.tags.items():
                client.describe(
                    shown.id,
                    {},
                    build_run_tags(run, _list_suite_evaluations(self._registry, run.id)),
                )
                client.set_status(shown.id, status, _get_end_time(run))

    def _find_unreported_metrics(self, evaluations: list[EvaluationRecord]) -> list[MetricRow]:
        """Scalar figures of the suites of which the run reports nothing among its metrics."""
        rows = [
            (e.suite, MetricRow(0, f"eval/{e.suite}/{name}", e.step, value, e.at))
            for e in evaluations
            for name, value in select_scalar_metrics(e.metrics).items()
        ]
        known = self._registry.results.metrics(self._run_id, names={row.name for _, row in rows})
        reported = {suite for suite, row in rows if row.name in known}
        return [row for suite, row in rows if suite not in reported]

    def _upload(self, at: _OpenMlflowRun, run: RunRecord) -> list[str]:
        """Uploads artifacts that are new or changed; returns the paths that are not there."""
        artifacts = self._registry.results.artifacts(self._run_id)
        if artifacts and run.directory is None:
            raise ValueError(f"{run.id} has artifacts but no directory")
        done = self._registry.results.mirror_cursor(self._run_id, _FILES)
        root = Path(run.directory or "")
        for artifact in artifacts:
            if artifact.seq > done and (root / artifact.path).exists():
                at.client.upload(at.id, root / artifact.path, artifact.path)
                self._registry.results.set_mirror_cursor(self._run_id, _FILES, artifact.seq)
        return [a.path for a in artifacts if not (root / a.path).exists()]


def is_mirror_behind(registry: Registry, run: RunRecord) -> bool:
    """Whether a run has ended and MLflow has not been told of it, or not of every value.

    A run that goes on is told by its own supervisor, and is never behind. Asks the registry alone.
    """
    cursor = registry.results.mirror_cursor
    if run.effective_status not in _ENDS:
        return False
    if cursor(run.id, _END) != len(registry.history(run.id)):
        return True
    return bool(registry.results.metric_rows_after(run.id, cursor(run.id, TARGET), 1))


class _MlflowPoints:
    """The values that MLflow holds of a run; each metric is asked for once, where it is there."""

    def __init__(self, client: MirrorClient, shown: MlflowRun) -> None:
        self._client = client
        self._shown = shown
        self._steps: dict[str, dict[int, set[MetricPoint]]] = {}

    def has_conflict(self, rows: Sequence[MetricRow]) -> bool:
        """Whether MLflow has another value where one of these belongs."""
        return any(
            points and build_metric_point(row) not in points
            for row in rows
            for points in [self._of(row.name).get(row.step)]
        )

    def add(self, rows: list[MetricRow]) -> None:
        """Takes note of what has been sent."""
        for row in rows:
            self._of(row.name).setdefault(row.step, set()).add(build_metric_point(row))

    def _of(self, name: str) -> dict[int, set[MetricPoint]]:
        if name not in self._steps:
            key = legal_key(name)
            there = key in self._shown.keys
            steps: dict[int, set[MetricPoint]] = {}
            for one in self._client.points(self._shown.id, key) if there else ():
                steps.setdefault(one.step, set()).add(one)
            self._steps[name] = steps
        return self._steps[name]


def _list_suite_evaluations(registry: Registry, run_id: str) -> list[EvaluationRecord]:
    """All but probes, whose figures are metrics already, under names of their own."""
    return [e for e in registry.results.evaluations(run_id) if not e.suite.startswith("probe/")]


def _get_end_time(run: RunRecord) -> float:
    """When a run ended, or was last heard of; used for ends alone."""
    return run.ended or run.heartbeat or time.time()


@contextmanager
def _hold_mirror_lock(uri: str, run: RunRecord) -> Iterator[None]:
    """Holds a lock while a run is looked for or made.

    It lies beside an SQLite store, for two processes may not both make its tables, and else in the
    run's folder.
    """
    scheme, _, path = uri.partition(":///")
    if scheme == "sqlite":
        lock = Path(f"{path.partition('?')[0]}.lock")
    elif run.directory is not None:
        lock = Path(run.directory) / ".mirror.lock"
    else:
        yield
        return
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise MirrorUnavailableError(
            f"cannot lock {lock} to tell MLflow: {error.strerror}"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
