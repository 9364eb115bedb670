"""Lists of runs, and what such a list shows of each: one query for all, and no bulky column.

The payload of an evaluation has every answer to it, so a list that read payloads would cost seconds
for a thousand runs.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from rlx_registry import models
from rlx_registry.database import Database, format_run_id, get_run_keys
from rlx_registry.idle_steps import count_idle_steps
from rlx_registry.records import RunRecord
from rlx_registry.states import has_status, require_statuses

__all__ = ["EvaluationFigures", "RunFilter", "RunLists", "build_run_record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Conditions that a run must meet, all of them; None and an empty set of statuses are none.

    Attributes:
        statuses: effective ones.
        created_from: earliest time of its submission, inclusive.
        created_before: latest, exclusive.
    """

    name: str | None = None
    group: str | None = None
    digest: str | None = None
    statuses: Collection[str] = ()
    created_from: float | None = None
    created_before: float | None = None


@dataclass(frozen=True, slots=True)
class EvaluationFigures:
    """An evaluation in a list of runs; see `EvaluationRecord`."""

    step: int
    label: str
    suite: str
    metrics: Mapping[str, Any]


class RunLists:
    """Reads lists of runs from one registry."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def select(self, wanted: RunFilter, limit: int | None = None) -> list[RunRecord]:
        """Returns the runs that meet a filter, newest first, and at most `limit` of them.

        Raises:
            ValueError: a status is unknown.
        """
        query = select(models.run).order_by(models.run.c.id.desc()).limit(limit)
        with self._database.open_reader() as connection:
            query = query.where(*_build_run_conditions(connection, wanted))
            return [build_run_record(row) for row in connection.execute(query)]

    def count(self, wanted: RunFilter) -> int:
        """Returns how many runs meet a filter."""
        query = select(func.count()).select_from(models.run)
        with self._database.open_reader() as connection:
            query = query.where(*_build_run_conditions(connection, wanted))
            return int(connection.scalar(query) or 0)

    def evaluation_figures(self, ids: Collection[str]) -> dict[str, list[EvaluationFigures]]:
        """Returns the figures of the evaluations of some runs, by step."""
        c = models.evaluation.c
        # Not their time: it lies behind the payload, which SQLite would have to read through.
        query = select(c.run_id, c.step, c.label, c.suite, c.metrics).order_by(c.run_id, c.step)
        found: dict[str, list[EvaluationFigures]] = {one: [] for one in ids}
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            for key, *fields in connection.execute(query.where(c.run_id.in_(list(called)))):
                found[called[key]].append(EvaluationFigures(*fields))
        return found

    def groups(self, ids: Collection[str]) -> dict[str, list[str]]:
        """Returns the groups of some runs, in the order in which the runs joined them."""
        c = models.grouped.c
        query = select(c.run_id, c.name).order_by(c.at, c.name)
        found: dict[str, list[str]] = {one: [] for one in ids}
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            for key, name in connection.execute(query.where(c.run_id.in_(list(called)))):
                found[called[key]].append(name)
        return found

    def failures(self, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Returns the payload of the last event "failed" of those of some runs that have one."""
        c = models.event.c
        query = select(c.run_id, c.payload).where(c.kind == "failed", c.payload.is_not(None))
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            rows = connection.execute(query.where(c.run_id.in_(list(called))).order_by(c.id))
            return {called[key]: payload for key, payload in rows}

    def idle_steps(self, ids: Collection[str]) -> dict[str, int]:
        """Returns `Queries.count_idle_steps` of some runs."""
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            counts = count_idle_steps(connection, called)
            return {called[key]: count for key, count in counts.items()}


def _build_run_conditions(
    connection: Connection, wanted: RunFilter
) -> Iterator[ColumnElement[bool]]:
    require_statuses(wanted.statuses)
    c = models.run.c
    if wanted.name is not None:
        yield c.name == wanted.name
    if wanted.digest is not None:
        yield c.digest == wanted.digest
    if wanted.group is not None:
        own = models.grouped.c
        yield c.id.in_(select(own.run_id).where(own.name == wanted.group))
    if wanted.statuses:
        yield has_status(connection, wanted.statuses, time.time())
    if wanted.created_from is not None:
        yield c.created >= wanted.created_from
    if wanted.created_before is not None:
        yield c.created < wanted.created_before


def build_run_record(row: Row[Any]) -> RunRecord:
    """Builds the record of a run from its row."""
    fields = dict(row._mapping)
    return RunRecord(**{**fields, "id": format_run_id(fields["id"])})
