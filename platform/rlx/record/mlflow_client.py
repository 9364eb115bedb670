"""Thin wrapper around MLflow's client: idempotent, quiet, with a single exception type."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from rlx.errors import EnvironmentFault
from rlx.record.mlflow_tags import legal_key
from rlx.record.time_limit import TimedCaller
from rlx.text import escape_unprintable, redact_passwords
from rlx_registry import MetricRow

__all__ = [
    "CALL_SECONDS",
    "MetricPoint",
    "MirrorClient",
    "MirrorUnavailableError",
    "MlflowRun",
    "build_metric_point",
    "create_sqlite_store",
    "quiet_environment",
]

EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Has MLflow show the runs of an experiment first. Versions with a switch between GenAI and model
training go by the address instead; see `rlx_registry.find_mlflow_link`."""
CALL_SECONDS = 120.0
"""Time limit of a call to MLflow, whose two tries may each wait 30 seconds for every read."""

_PAGE = 1000

P = ParamSpec("P")
T = TypeVar("T")


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
    experiment_id: str
    status: str
    tags: dict[str, str]
    keys: frozenset[str]


def build_metric_point(row: MetricRow) -> MetricPoint:
    """Converts a registry value to MLflow's representation, deterministically."""
    return MetricPoint(_convert_to_milliseconds(row.at), row.step, row.value)


def _limit_time(
    method: Callable[Concatenate["MirrorClient", P], T],
) -> Callable[Concatenate["MirrorClient", P], T]:
    """Limits the time of a client's method, and raises only `MirrorUnavailableError`."""

    @wraps(method)
    def call_method(self: "MirrorClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with _convert_errors(self.uri):
            return self.caller.call(lambda: method(self, *args, **kwargs))

    return call_method


class MirrorClient:
    """Wrapper of `mlflow.MlflowClient` that raises only `MirrorUnavailableError`.

    It avoids the fluent API, which keeps global state and guesses a run's status.

    Args:
        uri: MLflow's tracking URI.
        caller: limits the time of calls; by default, only that of each.
    """

    def __init__(self, uri: str, caller: TimedCaller | None = None) -> None:
        self.uri = uri
        self.caller = caller or TimedCaller(CALL_SECONDS)
        _prepare_mlflow()
        with _convert_errors(uri):
            self._mlflow: Any = self.caller.call(lambda: _connect(uri))

    @_limit_time
    def experiment(self, name: str, artifact_location: str | None) -> str:
        """Returns the id of an experiment, which is created if there is none."""
        found = self._mlflow.get_experiment_by_name(name)
        if found is None:
            made = self._mlflow.create_experiment(
                name, artifact_location=artifact_location, tags=EXPERIMENT_TAGS
            )
            return str(made)
        if found.lifecycle_stage == "deleted":
            self._mlflow.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    @_limit_time
    def find(self, mlflow_run_id: str) -> MlflowRun | None:
        """Returns the run, restored if it or its experiment was deleted; None if there is none."""
        from mlflow.exceptions import MlflowException

        try:
            found = self._mlflow.get_run(mlflow_run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if found.info.lifecycle_stage == "deleted":
            experiment = self._mlflow.get_experiment(found.info.experiment_id)
            if experiment.lifecycle_stage == "deleted":
                self._mlflow.restore_experiment(experiment.experiment_id)
            self._mlflow.restore_run(mlflow_run_id)
        return _build_mlflow_run(found)

    @_limit_time
    def list_tagged_runs(self, experiment_id: str, tags: Mapping[str, str]) -> list[MlflowRun]:
        """Returns the undeleted runs that have these tags, sorted by id."""
        condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = self._mlflow.search_runs([experiment_id], condition)
        return sorted((_build_mlflow_run(run) for run in found), key=lambda run: run.id)

    @_limit_time
    def running(self) -> list[MlflowRun]:
        """Returns every run of every experiment that MLflow shows as running."""
        experiments = _collect_pages(self._mlflow.search_experiments)
        ids = [e.experiment_id for e in experiments]
        condition = "attributes.status = 'RUNNING'"
        found = _collect_pages(self._mlflow.search_runs, ids, condition) if ids else []
        return [_build_mlflow_run(run) for run in found]

    @_limit_time
    def list_run_ids(self) -> set[str]:
        """Returns the ids of all runs of all experiments, deleted ones included."""
        from mlflow.entities import ViewType

        everything = ViewType.ALL
        experiments = _collect_pages(self._mlflow.search_experiments, everything)
        ids = [e.experiment_id for e in experiments]
        found = _collect_pages(self._mlflow.search_runs, ids, "", everything) if ids else []
        return {str(run.info.run_id) for run in found}

    @_limit_time
    def points(self, mlflow_run_id: str, key: str) -> list[MetricPoint]:
        """Returns the history of one metric."""
        found = self._mlflow.get_metric_history(mlflow_run_id, key)
        return [MetricPoint(m.timestamp, m.step, m.value) for m in found]

    @_limit_time
    def discard(self, mlflow_run_id: str) -> None:
        """Deletes a run; MLflow can restore it."""
        self._mlflow.delete_run(mlflow_run_id)

    @_limit_time
    def create_run(
        self, experiment_id: str, name: str, started: float, tags: Mapping[str, str]
    ) -> str:
        made = self._mlflow.create_run(
            experiment_id, _convert_to_milliseconds(started), dict(tags), name
        )
        return str(made.info.run_id)

    @_limit_time
    def describe(
        self, mlflow_run_id: str, params: Mapping[str, str], tags: Mapping[str, str]
    ) -> None:
        from mlflow.entities import Param, RunTag

        self._mlflow.log_batch(
            mlflow_run_id,
            params=[Param(key, value) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
            synchronous=True,
        )

    @_limit_time
    def write_metrics(self, mlflow_run_id: str, rows: list[MetricRow]) -> None:
        from mlflow.entities import Metric

        points = [(legal_key(row.name), build_metric_point(row)) for row in rows]
        metrics = [Metric(key, p.value, p.timestamp, p.step) for key, p in points]
        self._mlflow.log_batch(mlflow_run_id, metrics=metrics, synchronous=True)

    @_limit_time
    def write_text(self, mlflow_run_id: str, text: str, path: str) -> None:
        self._mlflow.log_text(mlflow_run_id, text, path)

    @_limit_time
    def upload(self, mlflow_run_id: str, file: Path, path: str) -> None:
        parent = Path(path).parent.as_posix()
        self._mlflow.log_artifact(mlflow_run_id, str(file), None if parent == "." else parent)

    @_limit_time
    def set_status(self, mlflow_run_id: str, status: str, ended: float | None) -> None:
        if status in ("SCHEDULED", "RUNNING"):
            self._mlflow.update_run(mlflow_run_id, status=status)
        else:
            self._mlflow.set_terminated(
                mlflow_run_id, status, _convert_to_milliseconds(ended or time.time())
            )


def create_sqlite_store(path: Path) -> None:
    """Has MLflow create its tables in a new SQLite file, which is closed afterwards.

    Takes many migrations and seconds.
    """
    _prepare_mlflow()
    uri = f"sqlite:///{path}"
    with _convert_errors(uri):
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        store = SqlAlchemyStore(uri, str(path.parent / "mlartifacts"))
        store.engine.dispose()


def _connect(uri: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    if uri.startswith("sqlite:"):
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        # MLflow keeps a process's connections, even those to a file that has been replaced.
        SqlAlchemyStore(uri, "").engine.dispose()
    return client


def _prepare_mlflow() -> None:
    """Keeps MLflow quiet; to be called before it is imported."""
    for name, value in quiet_environment().items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)


@contextmanager
def _convert_errors(uri: str) -> Iterator[None]:
    try:
        yield
    # MLflow passes on any exception of its server, its database and their libraries.
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = escape_unprintable(redact_passwords(f"MLflow at {uri}: {first}", uri))
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
    return MlflowRun(
        str(run.info.run_id),
        str(run.info.experiment_id),
        str(run.info.status),
        dict(run.data.tags),
        keys,
    )


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
