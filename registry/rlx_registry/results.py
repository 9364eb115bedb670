"""The results of a run: metrics, events, evaluations, files and rollouts.

Writing a result again overwrites it, so a step repeated after a resume leaves one record, not two.
Only events are append-only.
"""

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from sqlalchemy import Connection, delete, func, insert, literal, select

from rlx_registry import models
from rlx_registry.database import Database, build_insert_if_absent, build_upsert, select_fields
from rlx_registry.errors import NotFoundError
from rlx_registry.records import (
    PREVIEW_LENGTH,
    ArtifactRecord,
    BodyRecord,
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    MetricRow,
    RolloutIndex,
)

NONFINITE = "health/nonfinite"
"""Metric that counts the non-finite values of a step."""


class RunResults:
    """Reads and writes the results of runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Metrics -----------------------------------------------------------------------------------

    def add_metrics(
        self, run_id: str, step: int, values: Mapping[str, float], at: float | None = None
    ) -> None:
        """Records one step's values, overwriting existing ones.

        A non-finite value is not stored, and deletes an earlier value of the same step. It is
        counted in `health/nonfinite` and named in an event.
        """
        at = time.time() if at is None else at
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        lost = sorted(set(numbers) - set(finite))
        if lost:
            finite[NONFINITE] = float(len(lost))
        if not finite:
            return
        table = models.metric
        with self._database.open_run_writer(run_id) as (connection, key):
            ids = _find_metric_keys(connection, {*finite, *lost})
            own = table.c.run_id == key
            newest = connection.scalar(select(func.max(table.c.seq)).where(own)) or 0
            rows = [
                {"run_id": key, "key_id": ids[name], "step": step, "value": value, "at": at}
                | {"seq": seq}
                for seq, (name, value) in enumerate(finite.items(), newest + 1)
            ]
            connection.execute(build_upsert(connection, table), rows)
            if lost:
                gone = table.c.key_id.in_([ids[name] for name in lost])
                connection.execute(delete(table).where(own, table.c.step == step, gone))
                message = f"step {step}: not finite: {', '.join(lost)}"
                event = {"kind": "nonfinite", "level": "warning", "message": message}
                connection.execute(insert(models.event), {"run_id": key, "at": at, **event})

    def metrics(
        self, run_id: str, names: Iterable[str] | None = None
    ) -> dict[str, list[tuple[int, float]]]:
        """Returns `{name: [(step, value), ...]}`, steps ascending."""
        name, table = models.metric_key.c.name, models.metric
        query = select(name, table.c.step, table.c.value)
        query = query.join(models.metric_key).order_by(table.c.step)
        if names is not None:
            query = query.where(name.in_(list(names)))
        series: dict[str, list[tuple[int, float]]] = {}
        for metric, step, value in self._database.read_run_rows(run_id, table, query):
            series.setdefault(metric, []).append((step, value))
        return dict(sorted(series.items()))  # databases differ in how they sort text

    def metric_rows_after(self, run_id: str, seq: int, limit: int) -> list[MetricRow]:
        """Returns at most `limit` values written after `seq`, in order of writing."""
        table = models.metric
        query = (
            select(table.c.seq, models.metric_key.c.name, table.c.step, table.c.value, table.c.at)
            .join(models.metric_key)
            .where(table.c.seq > seq)
            .order_by(table.c.seq)
            .limit(limit)
        )
        return [MetricRow(*row) for row in self._database.read_run_rows(run_id, table, query)]

    def mirror_cursor(self, run_id: str, target: str) -> int:
        """Returns the last `seq` that a tracker has been sent; 0 before the first."""
        table = models.mirror
        query = select(table.c.seq).where(table.c.target == target)
        return sum(row.seq for row in self._database.read_run_rows(run_id, table, query))

    def set_mirror_cursor(self, run_id: str, target: str, seq: int) -> None:
        """Stores the last `seq` that a tracker has been sent."""
        with self._database.open_run_writer(run_id) as (connection, key):
            row = {"run_id": key, "target": target, "seq": seq}
            connection.execute(build_upsert(connection, models.mirror), row)

    # Events and evaluations --------------------------------------------------------------------

    def add_event(
        self,
        run_id: str,
        kind: str,
        message: str,
        payload: Mapping[str, Any] | None = None,
        level: str = "info",
    ) -> None:
        """Appends an event."""
        row = {"kind": kind, "level": level, "message": message, "at": time.time()}
        row["payload"] = replace_non_finite(payload)
        with self._database.open_run_writer(run_id) as (connection, key):
            connection.execute(insert(models.event), {"run_id": key, **row})

    def events(self, run_id: str, after: int = 0, limit: int | None = None) -> list[EventRecord]:
        """Returns events with an id above `after`, oldest first; of many, the newest `limit`."""
        table = models.event
        query = select_fields(table, EventRecord).where(table.c.id > after)
        query = query.order_by(table.c.id.desc()).limit(limit)
        rows = self._database.read_run_rows(run_id, table, query)
        return [EventRecord(*row) for row in rows][::-1]

    def add_evaluation(
        self,
        run_id: str,
        step: int,
        label: str,
        suite: str,
        n: int,
        metrics: Mapping[str, Any],
        payload: Mapping[str, Any] | None = None,
    ) -> None:
        """Records an evaluation; one per step, label ("before", "after", "step") and suite."""
        row = {"step": step, "label": label, "suite": suite, "n": n}
        row |= {"metrics": replace_non_finite(metrics), "payload": replace_non_finite(payload)}
        with self._database.open_run_writer(run_id) as (connection, key):
            connection.execute(
                build_upsert(connection, models.evaluation),
                {"run_id": key, "at": time.time(), **row},
            )

    def evaluations(
        self, run_id: str, suite: str | None = None, *, with_payload: bool = True
    ) -> list[EvaluationRecord]:
        """Returns evaluations by step, then by time; of one suite, of those that begin with
        "NAME/", or of all."""
        c = models.evaluation.c
        payload = c.payload if with_payload else literal(None)
        query = select(c.step, c.label, c.suite, c.n, c.metrics, payload, c.at)
        if suite is not None:
            whole = suite.endswith("/")
            query = query.where(c.suite.startswith(suite) if whole else c.suite == suite)
        query = query.order_by(c.step, c.at)
        rows = self._database.read_run_rows(run_id, models.evaluation, query)
        return [EvaluationRecord(*row) for row in rows]

    # Files -------------------------------------------------------------------------------------

    def add_checkpoint(
        self, run_id: str, step: int, path: Path | str, bytes: int, sha256: str
    ) -> None:
        """Records a checkpoint that is complete on disk, inside the run's directory."""
        with self._database.open_run_writer(run_id) as (connection, key):
            row = {"run_id": key, "at": time.time(), "step": step, "bytes": bytes, "sha256": sha256}
            row["path"] = _get_relative_path(connection, key, path)
            connection.execute(build_upsert(connection, models.checkpoint), row)

    def checkpoints(self, run_id: str) -> list[CheckpointRecord]:
        """Returns checkpoints by step."""
        table = models.checkpoint
        query = select_fields(table, CheckpointRecord).order_by(table.c.step)
        return [
            CheckpointRecord(*row) for row in self._database.read_run_rows(run_id, table, query)
        ]

    def add_artifact(self, run_id: str, path: Path | str, kind: str) -> None:
        """Records a file of the run to mirror; adding it again marks it as changed."""
        with self._database.open_run_writer(run_id) as (connection, key):
            c, place = models.artifact.c, _get_relative_path(connection, key, path)
            connection.execute(delete(models.artifact).where(c.run_id == key, c.path == place))
            row = {"run_id": key, "path": place, "kind": kind, "at": time.time()}
            connection.execute(insert(models.artifact), row)

    def artifacts(self, run_id: str) -> list[ArtifactRecord]:
        """Returns artifacts, most recently changed last."""
        table = models.artifact
        query = select_fields(table, ArtifactRecord).order_by(table.c.seq)
        return [ArtifactRecord(*row) for row in self._database.read_run_rows(run_id, table, query)]

    # Rollouts ----------------------------------------------------------------------------------

    def add_rollouts(
        self,
        run_id: str,
        step: int,
        *,
        path: Path | str,
        sha256: str,
        bytes: int,
        statistics: Mapping[str, Any],
        index: Sequence[RolloutIndex],
    ) -> None:
        """Records a step's rollouts: the path of their file, and one index row per trained row.

        Raises:
            ValueError: a reward or an advantage is not finite (absent rewards are None), or the
                path is outside the run's directory.
        """
        rows = []
        for item in index:
            row = {name: getattr(item, name) for name in RolloutIndex.__dataclass_fields__}
            for name in ("reward", "advantage"):
                if row[name] is not None and not math.isfinite(row[name]):
                    raise ValueError(f"row {item.row}: {name} is {row[name]}")
            row |= {name: replace_non_finite(row[name]) for name in ("rewards", "scores")}
            rows.append({**row, "preview": item.preview[:PREVIEW_LENGTH]})
        body = {"sha256": sha256, "bytes": bytes, "statistics": replace_non_finite(statistics)}
        table = models.rollout
        with self._database.open_run_writer(run_id) as (connection, key):
            place = {"run_id": key, "step": step}
            body |= {**place, "at": time.time(), "path": _get_relative_path(connection, key, path)}
            connection.execute(build_upsert(connection, models.rollout_step), body)
            connection.execute(delete(table).where(table.c.run_id == key, table.c.step == step))
            if rows:
                connection.execute(insert(table), [{**row, **place} for row in rows])

    def rollout_steps(self, run_id: str) -> list[int]:
        """Returns the steps whose rollouts are recorded, ascending."""
        table = models.rollout_step
        query = select(table.c.step).order_by(table.c.step)
        return [row.step for row in self._database.read_run_rows(run_id, table, query)]

    def rollout_index(
        self, run_id: str, step: int, trees: Collection[int] | None = None
    ) -> list[RolloutIndex]:
        """Returns a step's index rows by row number, of some trees or of all."""
        table = models.rollout
        query = select_fields(table, RolloutIndex).where(table.c.step == step)
        if trees is not None:
            query = query.where(table.c.tree.in_(list(trees)))
        rows = self._database.read_run_rows(run_id, table, query.order_by(table.c.row))
        # Rows that are older than their scores have null.
        return [RolloutIndex(**{**row._mapping, "scores": row.scores or {}}) for row in rows]

    def rollout_body(self, run_id: str, step: int) -> BodyRecord:
        """Returns the record of a step's rollout file; NotFoundError if there is none."""
        table = models.rollout_step
        query = select_fields(table, BodyRecord).where(table.c.step == step)
        for row in self._database.read_run_rows(run_id, table, query):
            return BodyRecord(*row)
        raise NotFoundError(f"{run_id} has no rollouts of step {step}")


def replace_non_finite(value: Any) -> Any:
    """Replaces non-finite numbers by None at any depth, because JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _find_metric_keys(connection: Connection, names: Iterable[str]) -> dict[str, int]:
    """Returns the id of each metric name, inserting new names."""
    table = models.metric_key
    names = sorted(names)  # one order for all writers, so that two of them cannot deadlock
    query = select(table.c.name, table.c.id).where(table.c.name.in_(names))
    known = {row.name: row.id for row in connection.execute(query)}
    if new := [{"name": name} for name in names if name not in known]:
        connection.execute(build_insert_if_absent(connection, table), new)
        known = {row.name: row.id for row in connection.execute(query)}
    return known


def _get_relative_path(connection: Connection, key: int, path: Path | str) -> str:
    """Returns a path relative to the run's directory. ValueError if it is outside, or the run has
    none yet."""
    path = Path(path)
    if path.is_absolute():
        c = models.run.c
        directory = connection.scalar(select(c.directory).where(c.id == key))
        if directory is None or not path.is_relative_to(directory):
            raise ValueError(f"{path} is not in the run's directory, {directory or 'not set yet'}")
        path = path.relative_to(directory)
    if path == Path() or ".." in path.parts:
        raise ValueError(f"{path} is not a path inside the run's directory")
    return str(PurePosixPath(path))
