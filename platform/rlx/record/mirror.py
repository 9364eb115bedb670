"""The MLflow mirror: what the registry knows of a run, shown in MLflow.

The registry is the truth. It keeps every metric in the order of writing, and a cursor that says how
far MLflow has been told, so a tracker that is down loses nothing: the rows wait. Every method here
may be called again after a crash between any two lines of it.

* What is sent twice arrives once: MLflow drops a metric whose key, step, timestamp and value it
  already has, and timestamps are the registry's.
* A run is found again by its tags, even when the crash came before the registry heard of it.
* MLflow is told a run's status explicitly; left to itself it shows killed runs as running for ever.
"""

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from rlx.record.mlflow_client import Client, MirrorDown
from rlx.record.mlflow_words import TAG_LIMIT, flat_params, identity, scalars, tags_of
from rlx_registry import EvaluationRecord, MetricRow, Registry, RunRecord

__all__ = ["MirrorDown", "MlflowMirror"]

TARGET = "mlflow"
"""Name of the metrics' cursor in the registry; files have one of their own."""

_FILES = "mlflow-files"
_PAGE = 1000  # MLflow's own limit for one request

_STATUS = {
    "submitted": "RUNNING",
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "lost": "FAILED",
    "stopped": "KILLED",
}
_ENDS = ("finished", "failed", "lost", "stopped")


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
        self._client: Client | None = None
        self._mlflow_run_id = ""

    def begin(self) -> None:
        """Finds or makes the MLflow run, and tells it parameters, tags, status and the spec.

        The first one to use an SQLite store also makes it, which takes seconds; others wait.
        """
        self._open()

    def deliver(self) -> int:
        """Sends the metrics that MLflow has not been told, in order, one request per step.

        Returns:
            How many values were sent.
        """
        client = self._client or self._open()
        cursor = self._registry.mirror_cursor(self._run_id, TARGET)
        sent = 0
        while rows := self._registry.metric_rows_after(self._run_id, cursor, _PAGE):
            for _, step in groupby(rows, key=lambda row: row.step):
                batch = list(step)
                client.write_metrics(self._mlflow_run_id, batch)
                cursor = batch[-1].seq
                self._registry.set_mirror_cursor(self._run_id, TARGET, cursor)
                sent += len(batch)
        return sent

    def finish(self, status: str) -> None:
        """Sends whatever is left, uploads the artifacts, and ends the MLflow run.

        Args:
            status: how the run ended, in the registry's words: "finished", "failed", "lost"
                (both FAILED in MLflow) or "stopped" (KILLED).

        Raises:
            ValueError: no such end.
        """
        if status not in _ENDS:
            raise ValueError(f"a run ends as one of {', '.join(_ENDS)}, not {status!r}")
        client = self._client or self._open()
        self.deliver()
        run = self._registry.run(self._run_id)
        evaluations = self._evaluations()
        client.write_metrics(self._mlflow_run_id, self._unreported(evaluations))
        missing = self._upload(client, run)
        tags = {**tags_of(run, evaluations), "rlx.status": status}
        tags |= {"rlx.missing_artifacts": ", ".join(missing)[:TAG_LIMIT]} if missing else {}
        client.describe(self._mlflow_run_id, {}, tags)
        client.set_status(self._mlflow_run_id, _STATUS[status], run.ended or time.time())

    # Inside ----------------------------------------------------------------------------------

    def _open(self) -> Client:
        run = self._registry.run(self._run_id)
        with _store_lock(self._uri):
            client = Client(self._uri)
            experiment_id = self._experiment(client, run.name)
            mlflow_run_id = self._find_run(client, run, experiment_id)
            if mlflow_run_id is None:
                mlflow_run_id = self._create_run(client, run, experiment_id)
        if mlflow_run_id != run.mlflow_run_id:
            # A store that was lost has been told nothing. The cursors go first: were the run
            # noted first, a crash in between would skip what the lost store had.
            self._registry.set_mirror_cursor(self._run_id, TARGET, 0)
            self._registry.set_mirror_cursor(self._run_id, _FILES, 0)
            self._registry.update_run(
                self._run_id, mlflow_run_id=mlflow_run_id, mlflow_experiment_id=experiment_id
            )
        tags = tags_of(run, self._evaluations())
        client.describe(mlflow_run_id, flat_params(run.spec), tags)
        client.write_text(mlflow_run_id, run.yaml, "spec.yaml")
        client.write_text(mlflow_run_id, json.dumps(run.spec, indent=2), "spec.resolved.json")
        client.set_status(mlflow_run_id, _STATUS[run.status], run.ended)
        self._client, self._mlflow_run_id = client, mlflow_run_id
        return client

    def _experiment(self, client: Client, name: str) -> str:
        root = self._artifact_root
        if root is None:
            return client.experiment(name, None)
        if "://" in str(root):
            return client.experiment(name, f"{str(root).rstrip('/')}/{name}")
        return client.experiment(name, (Path(root).absolute() / name).as_uri())

    def _find_run(self, client: Client, run: RunRecord, experiment_id: str) -> str | None:
        if run.mlflow_run_id is not None and client.revive(run.mlflow_run_id):
            return run.mlflow_run_id
        return client.tagged(experiment_id, identity(run))

    def _create_run(self, client: Client, run: RunRecord, experiment_id: str) -> str:
        name = f"{run.name} seed {run.seed} ({run.id})"
        return client.create_run(experiment_id, name, run.started or run.created, identity(run))

    def _evaluations(self) -> list[EvaluationRecord]:
        """All but probes, whose figures are metrics already, under names of their own."""
        every = self._registry.evaluations(self._run_id)
        return [e for e in every if not e.suite.startswith("probe/")]

    def _unreported(self, evaluations: list[EvaluationRecord]) -> list[MetricRow]:
        """Scalar figures of the suites of which the run reports nothing among its metrics."""
        rows = [
            (e.suite, MetricRow(0, f"eval/{e.suite}/{name}", e.step, value, e.at))
            for e in evaluations
            for name, value in scalars(e.metrics).items()
        ]
        known = self._registry.metrics(self._run_id, names={row.name for _, row in rows})
        reported = {suite for suite, row in rows if row.name in known}
        return [row for suite, row in rows if suite not in reported]

    def _upload(self, client: Client, run: RunRecord) -> list[str]:
        """Uploads artifacts that are new or changed; returns the paths that are not there."""
        artifacts = self._registry.artifacts(self._run_id)
        if artifacts and run.directory is None:
            raise ValueError(f"{run.id} has artifacts but no directory")
        done = self._registry.mirror_cursor(self._run_id, _FILES)
        root = Path(run.directory or "")
        for artifact in artifacts:
            if artifact.seq > done and (root / artifact.path).exists():
                client.upload(self._mlflow_run_id, root / artifact.path, artifact.path)
                self._registry.set_mirror_cursor(self._run_id, _FILES, artifact.seq)
        return [a.path for a in artifacts if not (root / a.path).exists()]


@contextmanager
def _store_lock(uri: str) -> Iterator[None]:
    """Holds a lock beside an SQLite store, for two processes may not both make its tables."""
    scheme, _, path = uri.partition(":///")
    if scheme != "sqlite":
        yield
        return
    lock = Path(f"{path.partition('?')[0]}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
