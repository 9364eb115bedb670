"""The registry: runs and their states, over everything that they report."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, Row, and_, func, insert, not_, or_, select, update

from rlx_registry import models
from rlx_registry.database import find_key, run_name
from rlx_registry.engine import backend, take_turn
from rlx_registry.ledger import Ledger
from rlx_registry.records import ENDED, HEARTBEAT_LIMIT, STATUSES, RunRecord, Status, StatusChange

__all__ = ["Registry"]

UPDATABLE = frozenset(
    {"directory", "mlflow_run_id", "mlflow_experiment_id", "pid", "phase", "steps_total", "step"}
)
BLOCKING: tuple[Status, ...] = ("finished", "submitted", "running")


class Registry(Ledger):
    """Runs remembered. Use as a context manager, or call `close()`.

    Run ids in arguments are "r-0042", "r-42" or "42"; every method that takes one raises NotFound
    when there is no such run. Methods may be called from any thread.
    """

    @classmethod
    def open(cls, url: str, *, create: bool = True, read_only: bool = False) -> Self:
        """Opens a registry, made where there is none unless it is read-only.

        An older SQLite file is copied and upgraded; an older PostgreSQL database is refused, as
        other machines may be using it: see `upgrade`.

        Args:
            url: `sqlite:///path` or `postgresql+psycopg://user@host/database`.

        Raises:
            Unavailable: there is no database (`create=False` or read-only), or it cannot be opened.
            SchemaError: it was written by a newer version, is not a registry, or is an older one
                that must not be upgraded here.
        """
        return cls(url, create=create, read_only=read_only)

    @staticmethod
    def upgrade(url: str) -> tuple[str | None, str]:
        """Brings a registry to the newest revision; an SQLite file is copied beside itself first.

        Returns:
            The revision it was at, None for a PostgreSQL database without a registry, and the one
            it is at now.

        Raises:
            Unavailable: there is no file, or the database cannot be opened.
            SchemaError: it was written by a newer version, or is not a registry.
        """
        database = backend(url)
        with database.translated():
            return database.upgrade()

    def submit(
        self,
        *,
        digest: str,
        seed: int,
        name: str,
        spec: Mapping[str, Any],
        yaml: str,
        plugins: list[dict[str, Any]],
        code: Mapping[str, Any],
        environment: Mapping[str, Any],
        again: bool = False,
    ) -> tuple[RunRecord, bool]:
        """Records a run, or returns the newest one with the same digest and seed.

        Runs that failed, were stopped or are lost do not stand in the way of a new one.

        Returns:
            The run, and whether it was created now.
        """
        with self._writing() as connection:
            # Nobody else can insert this pair between our look and our own insertion.
            take_turn(connection, f"rlx submit {digest} {seed}")
            c, now = models.run.c, time.time()
            same = select(models.run).where(c.digest == digest, c.seed == seed)
            same = same.where(_has_status(BLOCKING, now)).order_by(c.id.desc()).limit(1)
            if not again and (row := connection.execute(same).one_or_none()):
                return _record(row), False
            values = {"digest": digest, "seed": seed, "name": name, "spec": spec, "yaml": yaml}
            values |= {"plugins": plugins, "code": code, "environment": environment}
            key = connection.execute(
                insert(models.run).returning(c.id),
                {**values, "status": "submitted", "created": now},
            ).scalar_one()
            change = {"run_id": key, "at": now, "after": "submitted", "attempt": 0}
            connection.execute(insert(models.status_change), change)
            return _record(connection.execute(select(models.run).where(c.id == key)).one()), True

    def run(self, ref: str) -> RunRecord:
        """Returns a run by id, by "latest", or by a name that no other run has.

        Raises:
            NotFound: nothing answers to it; the message names the nearest ids.
            Ambiguous: several runs have that name.
        """
        with self._reading() as connection:
            key = find_key(connection, ref)
            return _record(
                connection.execute(select(models.run).where(models.run.c.id == key)).one()
            )

    def runs(
        self, *, name: str | None = None, status: str | None = None, limit: int | None = None
    ) -> list[RunRecord]:
        """Returns runs, newest first; `status` is the effective one."""
        query = select(models.run).order_by(models.run.c.id.desc()).limit(limit)
        if name is not None:
            query = query.where(models.run.c.name == name)
        if status is not None:
            _require_statuses([status])
            query = query.where(_has_status([status], time.time()))
        with self._reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def update_run(self, run_id: str, **fields: str | int | Path | None) -> None:
        """Sets plain columns: directory, mlflow ids, pid, phase, steps_total, step.

        Raises:
            TypeError: a field is not one of these; status changes by `transition` alone.
        """
        if unknown := fields.keys() - UPDATABLE:
            raise TypeError(f"update_run cannot set {', '.join(sorted(unknown))}")
        if not fields:
            return
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in fields.items()}
        with self._writing_run(run_id) as (connection, key):
            connection.execute(update(models.run).where(models.run.c.id == key).values(plain))

    def transition(
        self, run_id: str, expect: Collection[str], to: str, reason: str | None = None
    ) -> bool:
        """Moves a run to a status if, and only if, it is in one of `expect`.

        "running" counts an attempt and sets `started` (the first time) and `heartbeat`; ends set
        `ended`. The change goes into the history.

        Returns:
            False when the run was in none of them; nothing has changed then.
        """
        return self._move(run_id, expect, to, reason) is not None

    def start(self, run_id: str, expect: Collection[str], reason: str | None = None) -> int | None:
        """Moves a run to "running" as `transition` does, for whoever will write it.

        Returns:
            The attempt that begins, which is the fencing token for `as_writer`: writers of the
            attempts before are refused from now on. None when the run was in none of `expect`.
        """
        return self._move(run_id, expect, "running", reason)

    def claim(self, expect: Collection[str], reason: str | None = None) -> RunRecord | None:
        """Starts the oldest run whose effective status is in `expect`.

        Any number of processes may claim at once: no two get the same run, and none waits for the
        other. A run that is lost may be claimed as such.

        Returns:
            The run, whose `attempt` is the fencing token for `as_writer`; None when none is left.
        """
        _require_statuses(expect)
        c = models.run.c
        oldest = select(c.id).where(_has_status(expect, time.time())).order_by(c.id).limit(1)
        with self._writing() as connection:
            key = connection.scalar(oldest.with_for_update(skip_locked=True))
            if key is None:
                return None
            _move(connection, key, STATUSES, "running", reason)
            return _record(connection.execute(select(models.run).where(c.id == key)).one())

    def _move(
        self, run_id: str, expect: Collection[str], to: str, reason: str | None
    ) -> int | None:
        _require_statuses([to, *expect])
        with self._writing_run(run_id) as (connection, key):
            return _move(connection, key, expect, to, reason)

    def history(self, run_id: str) -> list[StatusChange]:
        """Returns every change of status, oldest first."""
        c = models.status_change.c
        query = select(c.at, c.before, c.after, c.reason, c.attempt).order_by(c.id)
        with self._reading_run(run_id) as (connection, key):
            return [StatusChange(*row) for row in connection.execute(query.where(c.run_id == key))]

    def heartbeat(self, run_id: str) -> bool:
        """Says that a run is alive.

        Returns:
            False when the run is not submitted or running any more: whoever beats should stop.
        """
        c = models.run.c
        with self._writing_run(run_id) as (connection, key):
            alive = update(models.run).where(c.id == key, c.status.in_(("submitted", "running")))
            return connection.execute(alive.values(heartbeat=time.time())).rowcount == 1


def _require_statuses(names: Collection[str]) -> None:
    if unknown := set(names) - set(STATUSES):
        known = ", ".join(STATUSES)
        raise ValueError(f"no status {', '.join(sorted(unknown))!r}; there are {known}")


def _move(
    connection: Connection, key: int, expect: Collection[str], to: str, reason: str | None
) -> int | None:
    """Changes the status of a locked run where it is expected; returns its attempt, else None."""
    c, now = models.run.c, time.time()
    before = connection.scalar(select(c.status).where(c.id == key))
    if before not in expect:
        return None
    values: dict[str, Any] = {"status": to, "reason": reason}
    if to == "running":
        values |= {"started": func.coalesce(c.started, now), "ended": None}
        values |= {"heartbeat": now, "attempt": c.attempt + 1}
    elif to in ENDED:
        values["ended"] = now
    change = update(models.run).where(c.id == key).values(values).returning(c.attempt)
    attempt = int(connection.execute(change).scalar_one())
    row = {"run_id": key, "at": now, "before": before, "after": to}
    row |= {"reason": reason, "attempt": attempt}
    connection.execute(insert(models.status_change), row)
    return attempt


def _has_status(statuses: Collection[str], now: float) -> ColumnElement[bool]:
    """`RunRecord.effective_status in statuses`, in SQL."""
    c = models.run.c
    silent = func.coalesce(c.heartbeat, c.started, c.created) < now - HEARTBEAT_LIMIT
    lost = and_(c.status.not_in(list(ENDED)), silent)
    plain = and_(c.status.in_(list(statuses)), not_(lost))
    return or_(plain, lost) if "lost" in statuses else plain


def _record(row: Row[Any]) -> RunRecord:
    fields = dict(row._mapping)
    return RunRecord(**{**fields, "id": run_name(fields["id"])})
