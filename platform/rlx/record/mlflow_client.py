"""The part of MLflow's client that rlx uses: idempotent, quiet, with one kind of failure."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlx.errors import RlxError
from rlx.record.mlflow_words import legal_key
from rlx_registry import MetricRow

__all__ = ["Client", "MirrorDown", "quiet_environment"]


class MirrorDown(RlxError):
    """MLflow cannot be reached or refused; nothing is lost, and the same call may be made again."""


class Client:
    """The part of `mlflow.MlflowClient` that is used, idempotent, with one kind of failure.

    The fluent interface is never touched: it keeps global state and guesses a run's status.
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

    def revive(self, mlflow_run_id: str) -> bool:
        """Says whether the run exists; undeletes it where somebody put it into the bin."""
        from mlflow.exceptions import MlflowException

        with self._reaching(self._uri):
            try:
                found = self._mlflow.get_run(mlflow_run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return False
            if found.info.lifecycle_stage == "deleted":
                self._mlflow.restore_run(mlflow_run_id)
            return True

    def tagged(self, experiment_id: str, tags: Mapping[str, str]) -> str | None:
        condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with self._reaching(self._uri):
            found = self._mlflow.search_runs([experiment_id], condition, max_results=1)
        return str(found[0].info.run_id) if found else None

    def create_run(
        self, experiment_id: str, name: str, started: float, tags: Mapping[str, str]
    ) -> str:
        with self._reaching(self._uri):
            made = self._mlflow.create_run(experiment_id, _millis(started), dict(tags), name)
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
            metrics = [Metric(legal_key(r.name), r.value, _millis(r.at), r.step) for r in rows]
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
            if status == "RUNNING":
                self._mlflow.update_run(mlflow_run_id, status=status)
            else:
                self._mlflow.set_terminated(mlflow_run_id, status, _millis(ended or time.time()))

    @contextmanager
    def _reaching(self, uri: str) -> Iterator[None]:
        from alembic.util.exc import CommandError
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError, CommandError, OSError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise MirrorDown(f"MLflow at {uri}: {first}") from error


def quiet_environment() -> dict[str, str]:
    """What MLflow needs to be told before it is imported; the user's own settings go first."""
    return {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the mirror's caller retries, and loses nothing
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    }


def _millis(seconds: float) -> int:
    return round(seconds * 1000)
