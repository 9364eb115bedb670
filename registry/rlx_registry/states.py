"""Status changes of runs, and SQL conditions for effective statuses."""

import time
from collections.abc import Collection
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, and_, func, insert, or_, select, update

from rlx_registry import models
from rlx_registry.database import format_run_id, select_fields
from rlx_registry.records import ENDED, LIVING, STATUSES, RunRecord, RunRow, Status


def require_statuses(names: Collection[str]) -> None:
    """Raises ValueError if a name is not a status."""
    if unknown := set(names) - set(STATUSES):
        known = ", ".join(STATUSES)
        raise ValueError(f"unknown status {', '.join(sorted(unknown))!r}; known: {known}")


def require_ended(connection: Connection, key: int) -> None:
    """Raises ValueError unless a run has ended."""
    status = connection.scalar(select(models.run.c.status).where(models.run.c.id == key))
    if status not in ENDED:
        raise ValueError(f"the run has not ended: it is {status}")


def change_run_status(
    connection: Connection, key: int, expect: Collection[str], to: str, reason: str | None
) -> int | None:
    """Changes a locked run's status if it is in `expect`; returns its attempt, else None."""
    c = models.run.c
    before, attempt = connection.execute(select(c.status, c.attempt).where(c.id == key)).one()
    if before not in expect:
        return None
    attempt += to == "running"
    write_status(connection, key, before=before, after=to, reason=reason, attempt=attempt)
    return int(attempt)


def write_status(
    connection: Connection,
    key: int,
    *,
    before: str | None,
    after: str,
    attempt: int,
    reason: str | None = None,
    at: float | None = None,
) -> None:
    """Sets the status of a locked run, with what follows from it, and adds it to the history."""
    c, at = models.run.c, time.time() if at is None else at
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
    connection.execute(insert(models.status_change), {**row, "reason": reason, "attempt": attempt})


def is_as_seen(connection: Connection, key: int, seen: RunRecord) -> bool:
    """Whether nobody has started, stopped or kept alive a locked run since it was read."""
    names = ("status", "attempt", "heartbeat", "host", "pid", "request")
    row = connection.execute(
        select(*(models.run.c[name] for name in names)).where(models.run.c.id == key)
    ).one()
    return tuple(row) == tuple(getattr(seen, name) for name in names)


def has_status(connection: Connection, statuses: Collection[str]) -> ColumnElement[bool]:
    """`RunRecord.effective_status in statuses`, in SQL."""
    c, lost = models.run.c, list(find_lost_runs(connection))
    plain = and_(c.status.in_(list(statuses)), c.id.not_in(lost))
    return or_(plain, c.id.in_(lost)) if "lost" in statuses else plain


def find_lost_runs(
    connection: Connection, among: Collection[int] | None = None
) -> dict[int, Status]:
    """Returns the recorded statuses of the living runs that have no supervisor, by run.

    Args:
        among: only these, which stay locked until the transaction ends; one that another writer
            has locked is not lost.
    """
    c = models.run.c
    query = select_fields(models.run, RunRow).where(c.status.in_(sorted(LIVING)))
    if among is not None:
        query = query.where(c.id.in_(sorted(among))).with_for_update(skip_locked=True)
    found = {row.id: build_run(RunRow, row) for row in connection.execute(query)}
    return {key: run.status for key, run in found.items() if run.effective_status == "lost"}


Kind = TypeVar("Kind", bound=RunRow)


def build_run(kind: type[Kind], row: Row[Any]) -> Kind:
    """Builds the record of a run from its columns."""
    return kind(**{**row._mapping, "id": format_run_id(row.id)})
