"""Reads a run back as a minimal list of changes that recreates it."""

from collections.abc import Iterator
from itertools import count, groupby
from typing import Any

from sqlalchemy import Connection, Row, select

from rlx_registry import models
from rlx_registry.changes import SETTABLE, RunChange

__all__ = ["SUBMITTED", "snapshot_run"]

SUBMITTED = ("digest", "seed", "name", "spec", "yaml", "plugins", "code", "environment")
"""Columns of a run that are fixed at submission."""


def snapshot_run(connection: Connection, key: int) -> Iterator[RunChange]:
    """Yields the changes that recreate a run: "run" first, then the others in order."""
    run = connection.execute(select(models.run).where(models.run.c.id == key)).one()._mapping
    yield RunChange("run", run["created"], {"id": key, **{name: run[name] for name in SUBMITTED}})
    yield from _snapshot_rows(connection, key, "moved", models.status_change, "id")
    columns = {name: run[name] for name in sorted(SETTABLE) if run[name] is not None}
    if columns:
        yield RunChange("set", run["created"], columns)
    yield from _snapshot_metrics(connection, key)
    yield from _snapshot_rows(connection, key, "event", models.event, "id")
    yield from _snapshot_rows(connection, key, "evaluation", models.evaluation, "at")
    yield from _snapshot_rows(connection, key, "checkpoint", models.checkpoint, "step")
    yield from _snapshot_rows(connection, key, "artifact", models.artifact, "seq")
    yield from _snapshot_rollouts(connection, key)
    yield from _snapshot_rows(connection, key, "grouped", models.grouped, "at")
    yield from _snapshot_rows(connection, key, "mirrored", models.mirror, "target")
    yield from _snapshot_rows(connection, key, "noted", models.note, "at")


def _snapshot_rows(
    connection: Connection, key: int, kind: str, table: Any, order: str
) -> Iterator[RunChange]:
    """Yields one change per row of a table."""
    query = select(table).where(table.c.run_id == key).order_by(table.c[order])
    for row in connection.execute(query):
        fields = _select_fields(row, "run_id")
        yield RunChange(kind, fields.pop("at", 0.0), fields)


def _snapshot_metrics(connection: Connection, key: int) -> Iterator[RunChange]:
    """Yields one change per series of consecutive values with the same step and time."""
    table = models.metric
    query = select(models.metric_key.c.name, table.c.step, table.c.at, table.c.seq, table.c.value)
    query = query.join(models.metric_key).where(table.c.run_id == key).order_by(table.c.seq)
    number = count()
    groups = groupby(
        connection.execute(query), lambda row: (row.step, row.at, row.seq - next(number))
    )
    for (step, at, _), group in groups:
        rows = list(group)
        values = {row.name: row.value for row in rows}
        fields = {"step": step, "time": at, "values": values, "seq": rows[0].seq}
        yield RunChange("metrics", at, fields)


def _snapshot_rollouts(connection: Connection, key: int) -> Iterator[RunChange]:
    steps, table = models.rollout_step, models.rollout
    for body in connection.execute(
        select(steps).where(steps.c.run_id == key).order_by(steps.c.step)
    ).all():
        rows = connection.execute(
            select(table)
            .where(table.c.run_id == key, table.c.step == body.step)
            .order_by(table.c.row)
        )
        index = [_select_fields(row, "run_id", "step") for row in rows]
        fields = _select_fields(body, "run_id", "at")
        yield RunChange("rollouts", body.at, {**fields, "index": index})


def _select_fields(row: Row[Any], *without: str) -> dict[str, Any]:
    return {name: value for name, value in row._mapping.items() if name not in without}
