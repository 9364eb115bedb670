"""Status changes of runs, and SQL conditions for effective statuses."""

from collections.abc import Collection

from sqlalchemy import ColumnElement, Connection, and_, func, not_, or_, select

from rlx_registry import models
from rlx_registry.changes import record_change
from rlx_registry.records import HEARTBEAT_LIMIT, LIVING, STATUSES

__all__ = ["change_run_status", "has_status", "is_silent", "require_statuses"]


def require_statuses(names: Collection[str]) -> None:
    """Raises ValueError if a name is not a status."""
    if unknown := set(names) - set(STATUSES):
        known = ", ".join(STATUSES)
        raise ValueError(f"no status {', '.join(sorted(unknown))!r}; there are {known}")


def change_run_status(
    connection: Connection, key: int, expect: Collection[str], to: str, reason: str | None
) -> int | None:
    """Changes a locked run's status if it is in `expect`; returns its attempt, else None."""
    c = models.run.c
    before, attempt = connection.execute(select(c.status, c.attempt).where(c.id == key)).one()
    if before not in expect:
        return None
    attempt += to == "running"
    row = {"before": before, "after": to, "reason": reason, "attempt": attempt}
    record_change(connection, key, "moved", **row)
    return int(attempt)


def has_status(statuses: Collection[str], now: float) -> ColumnElement[bool]:
    """`RunRecord.effective_status in statuses`, in SQL."""
    c = models.run.c
    lost = and_(c.status.in_(sorted(LIVING)), is_silent(now))
    plain = and_(c.status.in_(list(statuses)), not_(lost))
    return or_(plain, lost) if "lost" in statuses else plain


def is_silent(now: float) -> ColumnElement[bool]:
    """Whether a run's last heartbeat is older than `HEARTBEAT_LIMIT`, in SQL."""
    c = models.run.c
    return func.coalesce(c.heartbeat, c.started, c.created) < now - HEARTBEAT_LIMIT
