"""Thin wrapper around MLflow's client: idempotent, quiet, with a single exception type."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rlx.errors import EnvironmentFault
from rlx.record.mlflow_tags import legal_key
from rlx.text import escape_unprintable, redact_passwords
from rlx_registry import MetricRow

__all__ = [
    "MetricPoint",
    "MirrorClient",
    "MirrorUnavailableError",
    "MlflowRun",
    "build_metric_point",
    "quiet_environment",
]

_PAGE = 1000


class MirrorUnavailableError(EnvironmentFault):
    """MLflow cannot be reached, or refused a request. Nothing is lost; the call can be retried."""


class MetricPoint(NamedTuple):
    """One metric value, identified as in MLflow; `timestamp` is in milliseconds."""

    timestamp: int
    step: int
    value: float


class MlflowRun(NamedTuple):
    """A run as recorded in MLflow; `keys` are the names of its metrics."""

    id: str
    status: str
    tags: dict[str, str]
    keys: frozenset[str]


def build_metric_point(row: MetricRow) -> MetricPoint:
    """Converts a registry value to MLflow's representation, deterministically."""
    return MetricPoint(_convert_to_milliseconds(row.at), row.step, row.value)


class MirrorClient:
    """Wrapper of `mlflow.MlflowClient` that raises only `MirrorUnavailableError`.

    It avoids the fluent API, which keeps global state and guesses a run's status.
    """

    def __init__(self, uri: str) -> None:
        for name, value in quiet_environment().items():
            os.environ.setdefault(name, value)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        with self._reaching(uri):
            from mlflow import MlflowClient

            self._mlflow: Any = MlflowClient(tracking_uri=uri)
        self._uri = uri

    def experiment(self, name: str, artifact_location: str | None) -> str:
        with self._reaching(self._uri):
            found = self._mlflow.get_experiment_by_name(name)
            if found is None:
                made = self._mlflow.create_experiment(name, artifact_location=artifact_location)
                return str(made)
            if found.lifecycle_stage == "deleted":
                self._mlflow.restore_experiment(found.experiment_id)
            return str(found.experiment_id)

    def find(self, mlflow_run_id: str) -> MlflowRun | None:
        """Returns the run, restored if it was deleted; None if there is no such run."""
        from mlflow.exceptions import MlflowException

        with self._reaching(self._uri):
            try:
                found = self._mlflow.get_run(mlflow_run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return None
            if found.info.lifecycle_stage == "deleted":
                self._mlflow.restore_run(mlflow_run_id)
        return _build_mlflow_run(found)

    def list_tagged_runs(self, experiment_id: str, tags: Mapping[str, str]) -> list[MlflowRun]:
        """Returns the undeleted runs that have these tags, sorted by id."""
        condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with self._reaching(self._uri):
            found = self._mlflow.search_runs([experiment_id], condition)
        return sorted((_build_mlflow_run(run) for run in found), key=lambda run: run.id)

    def running(self) -> list[MlflowRun]:
        """Returns every run of every experiment that MLflow shows as running."""
        with self._reaching(self._uri):
            experiments = _collect_pages(self._mlflow.search_experiments)
            ids = [e.experiment_id for e in experiments]
            condition = "attributes.status = 'RUNNING'"
            found = _collect_pages(self._mlflow.search_runs, ids, condition) if ids else []
        return [_build_mlflow_run(run) for run in found]

    def points(self, mlflow_run_id: str, key: str) -> list[MetricPoint]:
        """Returns the history of one metric."""
        with self._reaching(self._uri):
            found = self._mlflow.get_metric_history(mlflow_run_id, key)
        return [MetricPoint(m.timestamp, m.step, m.value) for m in found]

    def discard(self, mlflow_run_id: str) -> None:
        """Deletes a run; MLflow can restore it."""
        with self._reaching(self._uri):
            self._mlflow.delete_run(mlflow_run_id)

    def create_run(
        self, experiment_id: str, name: str, started: float, tags: Mapping[str, str]
    ) -> str:
        with self._reaching(self._uri):
            made = self._mlflow.create_run(
                experiment_id, _convert_to_milliseconds(started), dict(tags), name
            )
        return str(made.info.run_id)

    def describe(
        self, mlflow_run_id: str, params: Mapping[str, str], tags: Mapping[str, str]
    ) -> None:
        from mlflow.entities import Param, RunTag

        with self._reaching(self._uri):
            self._mlflow.log_batch(
                mlflow_run_id,
                params=[Param(key, value) for key, value in params.items()],
                tags=[RunTag(key, value) for key, value in tags.items()],
                synchronous=True,
            )

    def write_metrics(self, mlflow_run_id: str, rows: list[MetricRow]) -> None:
        from mlflow.entities import Metric

        with self._reaching(self._uri):
            points = [(legal_key(row.name), build_metric_point(row)) for row in rows]
            metrics = [Metric(key, p.value, p.timestamp, p.step) for key, p in points]
            self._mlflow.log_batch(mlflow_run_id, metrics=metrics, synchronous=True)

    def write_text(self, mlflow_run_id: str, text: str, path: str) -> None:
        with self._reaching(self._uri):
            self._mlflow.log_text(mlflow_run_id, text, path)

    def upload(self, mlflow_run_id: str, file: Path, path: str) -> None:
        parent = Path(path).parent.as_posix()
        with self._reaching(self._uri):
            self._mlflow.log_artifact(mlflow_run_id, str(file), None if parent == "." else parent)

    def set_status(self, mlflow_run_id: str, status: str, ended: float | None) -> None:
        with self._reaching(self._uri):
            if status in ("SCHEDULED", "RUNNING"):
                self._mlflow.update_run(mlflow_run_id, status=status)
            else:
                self._mlflow.set_terminated(
                    mlflow_run_id, status, _convert_to_milliseconds(ended or time.time())
                )

    @contextmanager
    def _reaching(self, uri: str) -> Iterator[None]:
        try:
            yield
        # MLflow passes on any exception of its server, its database and their libraries.
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = escape_unprintable(redact_passwords(f"MLflow at {uri}: {first}"))
            raise MirrorUnavailableError(message) from error


def quiet_environment() -> dict[str, str]:
    """Environment variables to set before importing MLflow; the user's own values win."""
    return {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the caller of the mirror retries
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    }


def _convert_to_milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _build_mlflow_run(run: Any) -> MlflowRun:
    keys = frozenset(run.data.metrics)
    return MlflowRun(str(run.info.run_id), str(run.info.status), dict(run.data.tags), keys)


def _collect_pages(search: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Collects all pages of a search."""
    found: list[Any] = []
    token: str | None = None
    while True:
        page = search(*arguments, max_results=_PAGE, page_token=token)
        found += page
        token = page.token
        if not token:
            return found
