"""Mirror a run from the registry to MLflow.

The registry is the source of truth. It stores every metric in write order and a cursor of what
MLflow has received, so nothing is lost while MLflow is down. Every method is idempotent: it can be
repeated after a crash at any point, and two processes can call it at once.

* Values sent twice are stored once: timestamps come from the registry, and MLflow drops a metric
  whose key, step, timestamp and value it already has.
* MLflow cannot change a value. If a resumed run repeats a step, its MLflow run contains values that
  the registry has replaced. That MLflow run is deleted, and a new one receives everything.
* An MLflow run is found by its tags, even after a crash before its id reached the registry. If a
  lost response caused a run to be created twice, the duplicate is deleted.
* The status is always set explicitly; MLflow alone would show killed runs as running forever.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from rlx.record.mlflow_client import (
    CALL_SECONDS,
    MirrorClient,
    MirrorUnavailableError,
    MlflowRun,
)
from rlx.record.mlflow_points import MlflowPoints, compare_points
from rlx.record.mlflow_store import ensure_store, hold_file_lock, locate_store_lock
from rlx.record.mlflow_tags import (
    TAG_LIMIT,
    build_identity_tags,
    build_run_tags,
    flat_params,
    get_experiment_name,
    select_scalar_metrics,
)
from rlx.record.time_limit import TimedCaller
from rlx.text import redact_passwords, redact_values
from rlx_registry import EvaluationRecord, MetricRow, Registry, RunRecord

__all__ = ["MirrorUnavailableError", "MlflowMirror", "is_mirror_behind"]

TARGET = "mlflow"
"""Name of the metrics cursor in the registry; files, end status and groups have their own."""

_FILES = "mlflow-files"
_END = "mlflow-end"  # number of status changes at the time the end was sent to MLflow
_GROUPS = "mlflow-groups"  # number of the run's groups at that time
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
    """The MLflow run that mirrors an attempt."""

    client: MirrorClient
    id: str
    attempt: int
    points: MlflowPoints


class MlflowMirror:
    """Keeps one run's MLflow run in sync with the registry. Not thread-safe.

    Every method raises `MirrorUnavailableError` if MLflow fails, and
    `rlx_registry.RegistryDatabaseError` if the registry fails.

    Args:
        registry: open for writing.
        run_id: id of the run in the registry.
        uri: MLflow's tracking URI: `sqlite:///path`, or `http://host:port`.
        artifact_root: folder with one subfolder of artifacts per experiment; None lets the tracking
            server choose.
        seconds: limit of the time of one method; None limits only each call to MLflow.
    """

    def __init__(
        self,
        registry: Registry,
        run_id: str,
        uri: str,
        artifact_root: Path | str | None,
        seconds: float | None = None,
    ) -> None:
        self._registry = registry
        self._run_id = registry.run(run_id).id
        self._uri = uri
        self._artifact_root = artifact_root
        self._caller = TimedCaller(CALL_SECONDS, seconds)
        self._known: _OpenMlflowRun | None = None

    def begin(self) -> None:
        """Finds or creates the MLflow run, and sends parameters, tags, status and the spec.

        The first process to use an SQLite store also creates it (`mlflow_store.py`), which takes
        seconds, while others wait. Ended runs of this registry that MLflow still shows as running
        are ended there too.
        """
        self._known = None
        with self._ensure_open_run() as at:
            self._correct_other_runs(at.client)

    def deliver(self) -> int:
        """Sends all metrics after the cursor, in order, in requests of limited size.

        Returns:
            Number of values sent.
        """
        with self._ensure_open_run() as at:
            self._correct_status(at)
            return self._deliver(at)[1]

    def finish(self, status: str) -> int:
        """Sends the remaining metrics, uploads the artifacts, and ends the MLflow run.

        Args:
            status: final status in the registry: "finished", "failed", "lost" (both FAILED in
                MLflow) or "stopped" (KILLED).

        Returns:
            Number of values sent.

        Raises:
            ValueError: `status` is not a final status.
        """
        if status not in _ENDS:
            raise ValueError(f"a run ends as one of {', '.join(_ENDS)}, not {status!r}")
        self._known = None  # search again: duplicates may have appeared since
        with self._ensure_open_run() as at:
            changes = len(self._registry.history(self._run_id))
            groups = len(self._registry.list_run_groups(self._run_id))
            run = self._registry.run(self._run_id)
            evaluations = _list_suite_evaluations(self._registry, self._run_id)
            at, sent = self._deliver(at, self._find_unreported_metrics(evaluations))
            missing = self._upload(at, run)
            tags = {**self._build_tags(run), "rlx.status": status}
            tags |= {"rlx.missing_artifacts": ", ".join(missing)[:TAG_LIMIT]} if missing else {}
            at.client.describe(at.id, {}, tags)
            at.client.set_status(at.id, _STATUS[status], _get_end_time(run))
            self._registry.results.set_mirror_cursor(self._run_id, _END, changes)
            self._registry.results.set_mirror_cursor(self._run_id, _GROUPS, groups)
        return sent

    def catch_up(self) -> int:
        """Sends pending metrics, and the end of the run if it has ended.

        Returns:
            Number of values sent.
        """
        status = self._registry.run(self._run_id).effective_status
        return self.finish(status) if status in _ENDS else self.deliver()

    def find_differences(self) -> Iterator[str]:
        """Yields a sentence for each point or status of MLflow that is not the registry's.

        Sends nothing, so a run must have been delivered before.
        """
        self._caller.restart()
        run = self._registry.run(self._run_id)
        client = MirrorClient(self._uri, self._caller)
        mlflow_run = None if run.mlflow_run_id is None else client.find(run.mlflow_run_id)
        if mlflow_run is None:
            yield f"MLflow has no run of {run.id}"
            return
        if mlflow_run.status != _STATUS[run.effective_status]:
            yield f"{run.id} is {run.effective_status}, and {mlflow_run.status} in MLflow"
        rows: list[MetricRow] = []
        while page := self._registry.results.metric_rows_after(
            run.id, rows[-1].seq if rows else 0, _PAGE
        ):
            rows += page
        more = self._find_unreported_metrics(_list_suite_evaluations(self._registry, run.id))
        yield from compare_points(client, mlflow_run, [*rows, *more])

    # Finding the MLflow run ------------------------------------------------------------------

    @contextmanager
    def _ensure_open_run(self) -> Iterator[_OpenMlflowRun]:
        """Yields the MLflow run of this attempt; searches again after MLflow was unavailable."""
        self._caller.restart()
        try:
            run, known = self._registry.run(self._run_id), self._known
            if known is None or (known.attempt, known.id) != (run.attempt, run.mlflow_run_id):
                self._known = known = self._open()
            yield known
        except MirrorUnavailableError:
            self._known = None
            raise

    def _open(self) -> _OpenMlflowRun:
        if remade := ensure_store(self._uri):
            self._registry.results.add_event(
                self._run_id, "mlflow_store_remade", remade, level="warning"
            )
        with _hold_mirror_lock(self._uri, self._registry.run(self._run_id)):
            run = self._registry.run(self._run_id)
            client = MirrorClient(self._uri, self._caller)
            mlflow_run = self._find_or_create_run(client, run)
            if mlflow_run.id != run.mlflow_run_id:
                self._record_mlflow_ids(mlflow_run.id, mlflow_run.experiment_id)
        client.describe(mlflow_run.id, flat_params(run.settings), self._build_tags(run))
        client.write_text(mlflow_run.id, redact_passwords(run.yaml), "spec.yaml")
        resolved = json.dumps(redact_values(run.settings), indent=2)
        client.write_text(mlflow_run.id, resolved, "spec.resolved.json")
        client.set_status(mlflow_run.id, _STATUS[run.effective_status], _get_end_time(run))
        return _OpenMlflowRun(client, mlflow_run.id, run.attempt, MlflowPoints(client, mlflow_run))

    def _experiment(self, client: MirrorClient, name: str) -> str:
        root = self._artifact_root
        if root is None:
            return client.experiment(name, None)
        if "://" in str(root):
            return client.experiment(name, f"{str(root).rstrip('/')}/{name}")
        return client.experiment(name, (Path(root).absolute() / name).as_uri())

    def _find_or_create_run(self, client: MirrorClient, run: RunRecord) -> MlflowRun:
        """Finds the run in MLflow, in any experiment, or creates it, and deletes its duplicates."""
        noted = None if run.mlflow_run_id is None else client.find(run.mlflow_run_id)
        experiment_id = (
            self._experiment(client, get_experiment_name(run))
            if noted is None
            else noted.experiment_id
        )
        if noted is None and not client.list_tagged_runs(experiment_id, build_identity_tags(run)):
            name = f"{run.name} seed {run.seed} ({run.id})"
            client.create_run(
                experiment_id, name, run.started or run.created, build_identity_tags(run)
            )
        # Search even after creating: a request whose response timed out was sent twice.
        same = client.list_tagged_runs(experiment_id, build_identity_tags(run))
        kept = noted or same[0]
        for mlflow_run in same:
            if mlflow_run.id != kept.id:
                client.discard(mlflow_run.id)
        return kept

    def _build_tags(self, run: RunRecord) -> dict[str, str]:
        evaluations = _list_suite_evaluations(self._registry, run.id)
        return build_run_tags(run, evaluations, self._registry.list_run_groups(run.id))

    def _record_mlflow_ids(self, mlflow_run_id: str, experiment_id: str) -> None:
        # A new MLflow run is empty. Reset the cursors first: if the id were recorded first, a crash
        # in between would skip everything that the lost run had received.
        for cursor in (TARGET, _FILES, _END, _GROUPS):
            self._registry.results.set_mirror_cursor(self._run_id, cursor, 0)
        self._registry.update_run(
            self._run_id, mlflow_run_id=mlflow_run_id, mlflow_experiment_id=experiment_id
        )

    # Sending ---------------------------------------------------------------------------------

    def _deliver(
        self, at: _OpenMlflowRun, more: Sequence[MetricRow] = ()
    ) -> tuple[_OpenMlflowRun, int]:
        """Sends the remaining metrics, and `more`.

        Returns:
            The MLflow run that now has them, and the number of metrics sent, without `more`.
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
        """Deletes the MLflow run and creates a new one, which receives everything."""
        run = self._registry.run(self._run_id)
        with _hold_mirror_lock(self._uri, run):
            if self._registry.run(self._run_id).mlflow_run_id == at.id:
                at.client.discard(at.id)
                self._registry.update_run(self._run_id, mlflow_run_id=None)
        self._known = self._open()
        return self._known

    def _correct_status(self, at: _OpenMlflowRun) -> None:
        """Corrects the status in MLflow, for example of a run that was reported as lost."""
        run = self._registry.run(self._run_id)
        mlflow_run, status = at.client.find(at.id), _STATUS[run.effective_status]
        if mlflow_run is None:
            raise MirrorUnavailableError(
                f"MLflow at {redact_passwords(self._uri)} has lost run {at.id}"
            )
        if mlflow_run.status != status:
            at.client.set_status(at.id, status, _get_end_time(run))

    def _correct_other_runs(self, client: MirrorClient) -> None:
        """Ends every run that MLflow shows as running but that has ended in the registry."""
        # A failure here must not hold up this run: the others are corrected later.
        with suppress(MirrorUnavailableError):
            for mlflow_run in client.running():
                self._correct_shown_run(client, mlflow_run)

    def _correct_shown_run(self, client: MirrorClient, mlflow_run: MlflowRun) -> None:
        with suppress(LookupError):  # a run of another registry, or a deleted one
            run = self._registry.run(mlflow_run.tags.get("rlx.run_id", ""))
            status = _STATUS[run.effective_status]
            if status != "RUNNING" and build_identity_tags(run).items() <= mlflow_run.tags.items():
                client.describe(mlflow_run.id, {}, self._build_tags(run))
                client.set_status(mlflow_run.id, status, _get_end_time(run))

    def _find_unreported_metrics(self, evaluations: list[EvaluationRecord]) -> list[MetricRow]:
        """Scalar metrics of evaluation suites that are not among the run's own metrics."""
        rows = [
            (e.suite, MetricRow(0, f"eval/{e.suite}/{name}", e.step, value, e.at))
            for e in evaluations
            for name, value in select_scalar_metrics(e.metrics).items()
        ]
        known = self._registry.results.metrics(self._run_id, names={row.name for _, row in rows})
        reported = {suite for suite, row in rows if row.name in known}
        return [row for suite, row in rows if suite not in reported]

    def _upload(self, at: _OpenMlflowRun, run: RunRecord) -> list[str]:
        """Uploads new and changed artifacts; returns the paths of missing files."""
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
    """Whether a run has ended but MLflow lacks its end status, a group or some of its metrics.

    A running run is mirrored by its own supervisor, so it is never behind. Reads the registry only.
    """
    cursor = registry.results.mirror_cursor
    if run.effective_status not in _ENDS:
        return False
    if cursor(run.id, _END) != len(registry.history(run.id)):
        return True
    if cursor(run.id, _GROUPS) != len(registry.list_run_groups(run.id)):
        return True
    return bool(registry.results.metric_rows_after(run.id, cursor(run.id, TARGET), 1))


def _list_suite_evaluations(registry: Registry, run_id: str) -> list[EvaluationRecord]:
    """All evaluations except probes, whose figures are recorded as metrics too."""
    return [
        e for e in registry.queries.evaluation_figures(run_id) if not e.suite.startswith("probe/")
    ]


def _get_end_time(run: RunRecord) -> float:
    """When a run ended, or its last heartbeat; only meaningful for ended runs."""
    return run.ended or run.heartbeat or time.time()


@contextmanager
def _hold_mirror_lock(uri: str, run: RunRecord) -> Iterator[None]:
    """Holds a file lock while an MLflow run is searched for or created.

    For an SQLite store it is the store's own, otherwise a file in the run's folder.
    """
    lock = locate_store_lock(uri)
    if lock is None and run.directory is not None:
        lock = Path(run.directory) / ".mirror.lock"
    with nullcontext() if lock is None else hold_file_lock(lock):
        yield
