"""Status changes of runs, and SQL conditions for effective statuses."""

import time
from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, not_, or_, select, update

from rlx_registry import models
from rlx_registry.records import ENDED, HEARTBEAT_LIMIT, LIVING, STATUSES, RunRecord
from rlx_registry.supervisors import is_supervisor_alive


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


def has_status(
    connection: Connection, statuses: Collection[str], now: float
) -> ColumnElement[bool]:
    """`RunRecord.effective_status in statuses`, in SQL."""
    c = models.run.c
    lost = and_(c.status.in_(sorted(LIVING)), is_lost(connection, now))
    plain = and_(c.status.in_(list(statuses)), not_(lost))
    return or_(plain, lost) if "lost" in statuses else plain


def is_lost(connection: Connection, now: float) -> ColumnElement[bool]:
    """Whether a living run has no supervisor, in SQL: see `RunRecord.effective_status`."""
    alive, gone = _look_at_supervisors(connection)
    c = models.run.c
    return or_(c.id.in_(gone), and_(_is_silent(now), c.id.not_in(alive)))


def is_blocking(
    connection: Connection, statuses: Collection[str], now: float
) -> ColumnElement[bool]:
    """Whether a run, by its status, keeps an identical one from being submitted, in SQL.

    A silent run does not. A run whose supervisor is seen to be gone does: who submits it again is
    to record that first.
    """
    alive, _ = _look_at_supervisors(connection)
    c = models.run.c
    silent = and_(c.status.in_(sorted(LIVING)), _is_silent(now), c.id.not_in(alive))
    return and_(c.status.in_(list(statuses)), not_(silent))


def _look_at_supervisors(connection: Connection) -> tuple[list[int], list[int]]:
    """The living runs whose supervisors are seen to be alive, and those whose are gone."""
    c = models.run.c
    living = select(c.id, c.directory).where(c.status.in_(sorted(LIVING)))
    seen = {key: is_supervisor_alive(folder) for key, folder in connection.execute(living)}
    alive = [key for key, is_alive in seen.items() if is_alive]
    return alive, [key for key, is_alive in seen.items() if is_alive is False]


def _is_silent(now: float) -> ColumnElement[bool]:
    """Whether a run's last heartbeat is older than `HEARTBEAT_LIMIT`, in SQL."""
    c = models.run.c
    return func.coalesce(c.heartbeat, c.started, c.created) < now - HEARTBEAT_LIMIT
