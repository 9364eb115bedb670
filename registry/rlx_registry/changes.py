"""The changes of a run: each has a name and every argument needed to replay it.

Every write to a run goes through `record_change`, so replaying a change from a journal has exactly
the effect on the tables that it had the first time. Numbers assigned by the database (of events,
artifacts, metric values and status changes) are part of the change.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column, Connection, delete, func, insert, select, update

from rlx_registry import models
from rlx_registry.engine import build_insert_if_absent, build_upsert
from rlx_registry.records import ENDED, LIVING

__all__ = [
    "SETTABLE",
    "RunChange",
    "TransactionChanges",
    "apply_change",
    "check_relative_path",
    "get_transaction_changes",
    "record_change",
]

SETTABLE = frozenset(
    {"directory", "mlflow_run_id", "mlflow_experiment_id", "host", "pid", "phase", "step"}
    | {"steps_total", "request", "origins"}
)
"""Columns of a run that a "set" change may write."""


@dataclass(frozen=True, slots=True)
class RunChange:
    """One change of a run.

    Attributes:
        kind: one of `KINDS`, or "run", which creates the run.
        at: time of the change.
        fields: keyword arguments of the function in `KINDS`.
    """

    kind: str
    at: float
    fields: Mapping[str, Any]


@dataclass(slots=True)
class TransactionChanges:
    """The changes of a transaction so far, by run, and the folders of those runs."""

    changes: dict[int, list[RunChange]] = field(default_factory=dict)
    directories: dict[int, str | None] = field(default_factory=dict)


def get_transaction_changes(connection: Connection) -> TransactionChanges:
    """Returns the changes of the connection's current transaction."""
    found: TransactionChanges = connection.info.setdefault("rlx", TransactionChanges())
    return found


def record_change(
    connection: Connection, key: int, change: str, at: float | None = None, /, **fields: Any
) -> None:
    """Applies a change to a run and records it for the journal; `change` is one of `KINDS`."""
    at = time.time() if at is None else at
    assigned = apply_change(connection, key, RunChange(change, at, fields))
    made = RunChange(change, at, {**fields, **assigned})
    get_transaction_changes(connection).changes.setdefault(key, []).append(made)


def apply_change(connection: Connection, key: int, change: RunChange) -> Mapping[str, Any]:
    """Applies a change to a run.

    Returns:
        What its journal line has instead: numbers that the database assigned, and None for what is
        in another file.

    Raises:
        TypeError: the change lacks a field or has an unknown one.
        ValueError: the kind is unknown, or a path in the change leaves the run's folder.
    """
    if change.kind not in KINDS:
        raise ValueError(f"unknown change {change.kind!r}")
    return KINDS[change.kind](connection, key, change.at, **change.fields) or {}


def _write_status_row(
    connection: Connection,
    key: int,
    at: float,
    *,
    before: str | None,
    after: str,
    reason: str | None,
    attempt: int,
    id: int | None = None,
) -> Mapping[str, Any]:
    c = models.run.c
    values: dict[str, Any] = {"status": after, "reason": reason, "attempt": attempt}
    values["ended"] = at if after in ENDED else None
    if after in LIVING and before is not None:
        values["heartbeat"] = at
    if after == "running":
        values["started"] = func.coalesce(c.started, at)
    if after in ("queued", "submitted"):
        # A request was meant for the previous supervisor, not for the next one.
        values |= {"request": None, "host": None, "pid": None}
    connection.execute(update(models.run).where(c.id == key).values(values))
    row = {"run_id": key, "at": at, "before": before, "after": after}
    row |= {"reason": reason, "attempt": attempt}
    return _insert_numbered_row(connection, models.status_change.c.id, row, id)


def _write_run_columns(connection: Connection, key: int, at: float, **columns: Any) -> None:
    if unknown := columns.keys() - SETTABLE:
        raise TypeError(f"a run has no column {', '.join(sorted(unknown))} to set")
    connection.execute(update(models.run).where(models.run.c.id == key).values(columns))
    if "directory" in columns:
        get_transaction_changes(connection).directories[key] = columns["directory"]


def _write_metric_rows(
    connection: Connection,
    key: int,
    at: float,
    *,
    step: int,
    time: float,
    values: Mapping[str, float],
    missing: Sequence[str] = (),
    seq: int | None = None,
) -> Mapping[str, Any]:
    table = models.metric
    ids = _metric_keys(connection, {*values, *missing})
    if seq is None:
        newest = select(func.max(table.c.seq)).where(table.c.run_id == key)
        seq = (connection.scalar(newest) or 0) + 1
    if missing:
        gone = table.c.key_id.in_([ids[name] for name in missing])
        connection.execute(delete(table).where(table.c.run_id == key, table.c.step == step, gone))
    rows = [
        {
            "run_id": key,
            "key_id": ids[name],
            "step": step,
            "value": value,
            "at": time,
            "seq": number,
        }
        for number, (name, value) in enumerate(values.items(), seq)
    ]
    connection.execute(build_upsert(connection, table), rows)
    return {"seq": seq}


def _write_event_row(
    connection: Connection,
    key: int,
    at: float,
    *,
    kind: str,
    level: str,
    message: str,
    payload: Mapping[str, Any] | None,
    id: int | None = None,
) -> Mapping[str, Any]:
    row = {"run_id": key, "at": at, "kind": kind, "level": level, "message": message}
    return _insert_numbered_row(connection, models.event.c.id, {**row, "payload": payload}, id)


def _write_evaluation_row(
    connection: Connection,
    key: int,
    at: float,
    *,
    step: int,
    label: str,
    suite: str,
    n: int,
    metrics: Mapping[str, Any],
    payload: Mapping[str, Any] | None,
) -> None:
    row = {"run_id": key, "at": at, "step": step, "label": label, "suite": suite, "n": n}
    connection.execute(
        build_upsert(connection, models.evaluation), {**row, "metrics": metrics, "payload": payload}
    )


def _write_checkpoint_row(
    connection: Connection, key: int, at: float, *, step: int, path: str, bytes: int, sha256: str
) -> None:
    row = {"run_id": key, "at": at, "step": step, "bytes": bytes, "sha256": sha256}
    connection.execute(
        build_upsert(connection, models.checkpoint), {**row, "path": check_relative_path(path)}
    )


def _write_artifact_row(
    connection: Connection, key: int, at: float, *, path: str, kind: str, seq: int | None = None
) -> Mapping[str, Any]:
    c = models.artifact.c
    connection.execute(delete(models.artifact).where(c.run_id == key, c.path == path))
    row = {"run_id": key, "path": check_relative_path(path), "kind": kind, "at": at}
    return _insert_numbered_row(connection, c.seq, row, seq)


def _write_step_rollouts(
    connection: Connection,
    key: int,
    at: float,
    *,
    step: int,
    path: str,
    sha256: str,
    bytes: int,
    statistics: Mapping[str, Any],
    index: Sequence[Mapping[str, Any]] | None,
    in_body: bool = False,
) -> Mapping[str, Any] | None:
    """Writes a step's rollouts; a journal leaves out the index that their file has."""
    place, table = {"run_id": key, "step": step}, models.rollout
    body = {
        "path": check_relative_path(path),
        "sha256": sha256,
        "bytes": bytes,
        "statistics": statistics,
    }
    connection.execute(build_upsert(connection, models.rollout_step), {**place, **body, "at": at})
    connection.execute(delete(table).where(table.c.run_id == key, table.c.step == step))
    if index:
        connection.execute(insert(table), [{**row, **place} for row in index])
    return {"index": None} if in_body else None


def _delete_rollout_rows(connection: Connection, key: int, at: float) -> None:
    for table in (models.rollout, models.rollout_step):
        connection.execute(delete(table).where(table.c.run_id == key))


def _write_group_row(connection: Connection, key: int, at: float, *, name: str) -> None:
    row = {"run_id": key, "name": name, "at": at}
    connection.execute(build_insert_if_absent(connection, models.grouped), row)


def _write_note_row(
    connection: Connection, key: int, at: float, *, note: str, tags: Sequence[str]
) -> None:
    row = {"run_id": key, "note": note, "tags": list(tags), "at": at}
    connection.execute(build_upsert(connection, models.note), row)


def _write_mirror_row(
    connection: Connection, key: int, at: float, *, target: str, seq: int
) -> None:
    connection.execute(
        build_upsert(connection, models.mirror), {"run_id": key, "target": target, "seq": seq}
    )


KINDS: Mapping[str, Callable[..., Mapping[str, Any] | None]] = {
    "moved": _write_status_row,
    "set": _write_run_columns,
    "metrics": _write_metric_rows,
    "event": _write_event_row,
    "evaluation": _write_evaluation_row,
    "checkpoint": _write_checkpoint_row,
    "artifact": _write_artifact_row,
    "rollouts": _write_step_rollouts,
    "rollouts_removed": _delete_rollout_rows,
    "grouped": _write_group_row,
    "mirrored": _write_mirror_row,
    "noted": _write_note_row,
}


def check_relative_path(path: str) -> str:
    """Returns a relative path; raises ValueError unless it stays inside the run's folder."""
    parts = path.split("/")
    if path in ("", ".") or path.startswith("/") or ".." in parts:
        raise ValueError(f"{path} is not a path inside the run's directory")
    return path


def _insert_numbered_row(
    connection: Connection, column: "Column[int]", row: Mapping[str, Any], number: int | None
) -> Mapping[str, int]:
    """Inserts a row; the database assigns its number if `number` is None."""
    fixed = {} if number is None else {column.name: number}
    statement = insert(column.table).returning(column)
    return {column.name: connection.execute(statement, {**row, **fixed}).scalar_one()}


def _metric_keys(connection: Connection, names: Iterable[str]) -> dict[str, int]:
    """Returns the id of each metric name, inserting new names."""
    table = models.metric_key
    names = sorted(names)  # one order for all writers, so that two of them cannot deadlock
    query = select(table.c.name, table.c.id).where(table.c.name.in_(names))
    known = {row.name: row.id for row in connection.execute(query)}
    if new := [{"name": name} for name in names if name not in known]:
        connection.execute(build_insert_if_absent(connection, table), new)
        known = {row.name: row.id for row in connection.execute(query)}
    return known
