"""MLflow as a tracker: one MLflow run for each run of the registry.

* A value that is sent twice is stored once: its time comes from the registry, and MLflow drops a
  metric whose key, step, time and value it already has.
* MLflow cannot change a value. If a resumed run repeats a step with another value, its MLflow run
  is deleted, and a new one receives everything.
* A run is found by its tags, even after a crash before its id reached the registry. A duplicate,
  which a lost response may cause, is deleted.

MLflow itself is imported only when something is sent, because that takes seconds.
"""

import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.home import get_rlx_home, tracking_url
from rlx.plugin import TrackedPoint, TrackedRun, Tracker
from rlx.record.tracker import (
    TAG_LIMIT,
    TrackerUnavailableError,
    describe_error,
    make_legal_key,
)
from rlx.text import redact_passwords
from rlx_registry import wait_for_lock

if TYPE_CHECKING:
    from rlx.spec import MlflowTrackerSpec


STATUSES = {"queued": "SCHEDULED", "submitted": "RUNNING", "running": "RUNNING"}
STATUSES |= {"finished": "FINISHED", "failed": "FAILED", "lost": "FAILED", "stopped": "KILLED"}
MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the sender retries
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Keeps MLflow quiet and quick to give up; the user's own values win."""
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Has MLflow show the runs of an experiment first, not traces."""
PARAM_LIMIT = 6000
"""Maximum characters of a parameter, as MLflow has it."""
ARTIFACTS = "mlartifacts"
"""Folder of the artifacts, beside an SQLite store."""
_HELD = "other processes hold it; find them with `fuser` on that file, and try again"


class MlflowTracker(Tracker):
    """One run in MLflow, whose ids the registry keeps. The artifacts of an SQLite store are below
    RLX_HOME, in one folder per experiment."""

    title = "MLflow"

    def __init__(self, settings: "MlflowTrackerSpec") -> None:
        super().__init__(settings)
        self._uri = tracking_url(settings.url)
        self.label = f"MLflow at {redact_passwords(self._uri)}"
        self._id = ""
        for name, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._keys: frozenset[str] = frozenset()
        self._points: dict[str, dict[int, set[tuple[int, float]]]] = {}

    def open_run(self, run: TrackedRun) -> int | None:
        """Finds or creates the run; sends parameters, tags, status and the experiment."""
        from mlflow.entities import Param

        with self._convert_errors():
            experiment, found = self._find_or_create(run)
            self._id = str(found.info.run_id)
            self.ids = {"mlflow_run_id": self._id, "mlflow_experiment_id": experiment}
            self._keys, self._points = frozenset(found.data.metrics), {}
            params = [Param(k, v[:PARAM_LIMIT]) for k, v in flatten_params(run.settings).items()]
            self._client.log_batch(self._id, params=params, synchronous=True)
            self._write_tags(build_tags(run))
            self._client.log_text(self._id, run.yaml, "spec.yaml")
            resolved = json.dumps(run.settings, indent=2)
            self._client.log_text(self._id, resolved, "spec.resolved.json")
            self._set_status(run)
        return None if self._keys else 0

    def add_points(self, points: Sequence[TrackedPoint]) -> bool:
        """Adds values; False if MLflow has others at the same steps."""
        from mlflow.entities import Metric

        with self._convert_errors():
            for point in points:
                there = self._read_points(point.name).get(point.step)
                if there and (_to_milliseconds(point.at), point.value) not in there:
                    self._client.delete_run(self._id)
                    self.ids = {"mlflow_run_id": None}
                    return False
            metrics = [Metric(p.name, p.value, _to_milliseconds(p.at), p.step) for p in points]
            self._client.log_batch(self._id, metrics=metrics, synchronous=True)
        return True

    def finish(self, run: TrackedRun, files: Sequence[tuple[Path, str]]) -> None:
        """Uploads files, and sends the tags and the status of the end."""
        missing = ", ".join(path for file, path in files if not file.exists())
        with self._convert_errors():
            for file, path in files:
                if file.exists():
                    inside = Path(path).parent.as_posix()
                    place = None if inside == "." else inside
                    self._client.log_artifact(self._id, str(file), place)
            more = {"rlx.missing_artifacts": missing[:TAG_LIMIT]} if missing else {}
            self._write_tags(build_tags(run) | more)
            self._set_status(run)

    def has_run(self, run: TrackedRun) -> bool:
        """Whether MLflow has the run, in its trash too."""
        with self._convert_errors():
            return self._get_run(run.ids["mlflow_run_id"]) is not None

    def discard(self, run: TrackedRun) -> None:
        """Moves the run to MLflow's trash."""
        mlflow_run_id = run.ids["mlflow_run_id"]
        with self._convert_errors():
            if (path := _find_store_file(self._uri)) is not None:
                _move_to_trash(path, mlflow_run_id)
                return
            found = self._get_run(mlflow_run_id)
            if found is not None and found.info.lifecycle_stage != "deleted":
                self._client.delete_run(mlflow_run_id)

    @cached_property
    def _client(self) -> Any:
        """MLflow's client, which keeps no global state, unlike its fluent interface."""
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow import MlflowClient

        prepare_store(self._uri)
        return MlflowClient(tracking_uri=self._uri)

    def _find_or_create(self, run: TrackedRun) -> tuple[str, Any]:
        """Returns the id of the run's experiment, and the run, whose duplicates are deleted."""
        known = self._get_run(run.ids["mlflow_run_id"])
        if known is not None and known.info.lifecycle_stage == "deleted":
            known = None
        place = (
            self._find_experiment(run.project) if known is None else str(known.info.experiment_id)
        )
        tags = dict(run.identity)
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        if known is None and not self._client.search_runs([place], wanted):
            name = f"{run.name} seed {run.seed} ({run.id})"
            began = _to_milliseconds(run.began or run.created)
            self._client.create_run(place, began, tags, name)
        # Search even after creating: a request whose response was lost was sent twice.
        same = sorted(self._client.search_runs([place], wanted), key=lambda one: one.info.run_id)
        kept = same[0] if known is None else known
        for other in same:
            if other.info.run_id != kept.info.run_id:
                self._client.delete_run(other.info.run_id)
        return place, kept

    def _find_experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            is_file = self._uri.startswith("sqlite:")
            place = (get_rlx_home() / ARTIFACTS / name).as_uri() if is_file else None
            try:
                return str(self._client.create_experiment(name, place, EXPERIMENT_TAGS))
            except MlflowException:  # another run may just have created it
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _get_run(self, mlflow_run_id: str | None) -> Any:
        """The run, also from the trash; None if there is none."""
        client = self._client
        from mlflow.exceptions import MlflowException

        if mlflow_run_id is None:
            return None
        try:
            return client.get_run(mlflow_run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _read_points(self, key: str) -> dict[int, set[tuple[int, float]]]:
        """Time and value of the points that MLflow had of a metric at the start, by step."""
        if key not in self._points:
            steps = self._points[key] = {}
            for point in (
                self._client.get_metric_history(self._id, key) if key in self._keys else ()
            ):
                steps.setdefault(point.step, set()).add((point.timestamp, point.value))
        return self._points[key]

    def _write_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        pairs = [RunTag(name, value) for name, value in tags.items()]
        self._client.log_batch(self._id, tags=pairs, synchronous=True)

    def _set_status(self, run: TrackedRun) -> None:
        """Sets the status explicitly; MLflow alone would show a killed run as running forever."""
        status = STATUSES[run.status]
        if status in ("SCHEDULED", "RUNNING"):
            self._client.update_run(self._id, status=status)
        else:
            ended = _to_milliseconds(run.ended or time.time())
            self._client.set_terminated(self._id, status, ended)

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Takes passwords out of errors, which MLflow passes on from any library."""
        try:
            yield
        except TrackerUnavailableError:
            raise
        except Exception as error:
            message = redact_passwords(describe_error(self, error), self._uri)
            raise TrackerUnavailableError(message) from error


def _to_milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def build_tags(run: TrackedRun) -> dict[str, str]:
    """All tags of a run, with those that MLflow itself shows."""
    tags = {
        **run.tags,
        "mlflow.source.name": "rlx",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": run.tags.get("rlx.commit", ""),
        "mlflow.note.content": run.description,
    }
    return {name: value for name, value in tags.items() if value and name != "rlx.commit"}


def flatten_params(spec: Mapping[str, Any]) -> dict[str, str]:
    """Flattens a resolved spec: keys joined by dots, lists by index, values as in JSON."""
    return {make_legal_key(path): value for path, value in _iterate_leaves("", spec)}


def _iterate_leaves(path: str, node: Any) -> Iterator[tuple[str, str]]:
    items = dict(enumerate(node)) if isinstance(node, list | tuple) else node
    if isinstance(items, Mapping) and items:
        for key, value in items.items():
            yield from _iterate_leaves(f"{path}.{key}" if path else str(key), value)
    else:
        yield path, node if isinstance(node, str) else json.dumps(node)


def prepare_store(uri: str) -> None:
    """Creates an SQLite store that does not exist, whole or not at all; other URIs need nothing.

    MLflow creates a store by many migrations, and cannot go on with one whose creation was
    interrupted. In a store that was moved or copied with its artifacts, their absolute locations
    are corrected, so that it does not write into the folder that it was copied from.
    """
    path = _find_store_file(uri)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        try:
            wait_for_lock(lock)
        except TimeoutError:
            raise TrackerUnavailableError(f"MLflow's store {path}: {_HELD}") from None
        if not path.exists():
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            aside = path.with_name(f"{path.name}.making")
            aside.unlink(missing_ok=True)  # of a process that was killed
            root = _get_artifact_root(path)
            SqlAlchemyStore(f"sqlite:///{aside}", root).engine.dispose()
            aside.replace(path)
            # MLflow keeps a process's connections, even those to a file that has been replaced.
            SqlAlchemyStore(uri, root).engine.dispose()
        elif path.with_name(ARTIFACTS).is_dir():
            try:
                _correct_locations(path)
            except sqlite3.Error as error:
                why = _HELD if error.sqlite_errorcode == sqlite3.SQLITE_BUSY else error
                raise TrackerUnavailableError(f"MLflow's store {path}: {why}") from error


def _find_store_file(uri: str) -> Path | None:
    scheme, _, place = uri.partition(":///")
    return Path(place.partition("?")[0]) if scheme == "sqlite" else None


def _move_to_trash(path: Path, mlflow_run_id: str | None) -> None:
    """Does what MLflow's `delete_run` does to a store, without its import, which takes seconds."""
    if not path.exists():
        return
    with closing(sqlite3.connect(path, timeout=30)) as store, store:
        store.execute(
            "UPDATE runs SET lifecycle_stage = 'deleted', deleted_time = ? "
            "WHERE run_uuid = ? AND lifecycle_stage != 'deleted'",
            (_to_milliseconds(time.time()), mlflow_run_id),
        )


def _get_artifact_root(path: Path) -> str:
    return path.absolute().with_name(ARTIFACTS).as_uri()


def _correct_locations(path: Path) -> None:
    root = _get_artifact_root(path)
    with closing(sqlite3.connect(path, timeout=30)) as store, store:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            inside = f"substr({column}, instr({column}, '/{ARTIFACTS}/') + {len(ARTIFACTS) + 1})"
            store.execute(
                f"UPDATE {table} SET {column} = ? || {inside} "
                f"WHERE {column} LIKE 'file:///%/{ARTIFACTS}/%' AND instr({column}, ?) != 1",
                (root, f"{root}/"),
            )
