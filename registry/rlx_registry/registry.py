"""The registry: runs and their states, over everything that they report."""

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Row, insert, select, update

from rlx_registry import models
from rlx_registry.changes import SETTABLE, record_change
from rlx_registry.database import Database, find_key, format_run_id
from rlx_registry.engine import acquire_named_lock, select_backend
from rlx_registry.journal_import import import_journal, read_journal
from rlx_registry.machines import Machines, claim_devices
from rlx_registry.queries import Queries
from rlx_registry.records import (
    LIVING,
    REQUESTS,
    STATUSES,
    DeviceRequest,
    ImportedRun,
    Request,
    RunRecord,
    StartedAttempt,
    Status,
    StatusChange,
)
from rlx_registry.results import RunResults
from rlx_registry.states import change_run_status, has_status, require_statuses

__all__ = ["Registry"]

UPDATABLE = SETTABLE - {"request"}
BLOCKING: tuple[Status, ...] = ("finished", "queued", "submitted", "running")


class Registry:
    """Runs remembered. Use as a context manager, or call `close()`.

    Run ids in arguments are "r-0042", "r-42" or "42"; every method that takes one raises NotFound
    when there is no such run. Methods may be called from any thread.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.results = RunResults(database)
        self.queries = Queries(database)
        self.machines = Machines(database)

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
        return cls(Database(url, create=create, read_only=read_only))

    def as_writer(self, run_id: str, attempt: int) -> Self:
        """Returns this registry for one attempt of one run: what it writes is fenced.

        See `Database.as_writer`. The connections are shared: close the registry, not its writers.

        Raises:
            NotFoundError: there is no such run.
        """
        return type(self)(self.database.as_writer(run_id, attempt))

    @property
    def url(self) -> str:
        """Where the registry is."""
        return self.database.url

    @property
    def label(self) -> str:
        """The database as messages name it: the file, or the URL without its password."""
        return self.database.label

    def write_atomically(self) -> AbstractContextManager[None]:
        """All that this thread writes in the block is written together, or not at all.

        Raises:
            DatabaseUnavailableError: nothing has been written.
        """
        return self.database.write_atomically()

    def close(self) -> None:
        """Closes every connection."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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
        database = select_backend(url)
        with database.translate_errors():
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
        queue: bool = False,
    ) -> tuple[RunRecord, bool]:
        """Records a run, or returns the newest one with the same digest and seed.

        Runs that failed, were stopped or are lost do not stand in the way of a new one.

        Args:
            again: makes a new run in any case.
            queue: the run is "queued", for a worker to claim, not "submitted".

        Returns:
            The run, and whether it was created now.
        """
        with self.database.open_writer() as connection:
            # Nobody else can insert this pair between our look and our own insertion.
            acquire_named_lock(connection, f"rlx submit {digest} {seed}")
            c, now = models.run.c, time.time()
            same = select(models.run).where(c.digest == digest, c.seed == seed)
            same = same.where(has_status(BLOCKING, now)).order_by(c.id.desc()).limit(1)
            if not again and (row := connection.execute(same).one_or_none()):
                return _build_run_record(row), False
            values = {"digest": digest, "seed": seed, "name": name, "spec": spec, "yaml": yaml}
            values |= {"plugins": plugins, "code": code, "environment": environment}
            status: Status = "queued" if queue else "submitted"
            key = connection.execute(
                insert(models.run).returning(c.id),
                {**values, "status": status, "created": now},
            ).scalar_one()
            first = {"before": None, "after": status, "reason": None, "attempt": 0}
            record_change(connection, key, "moved", now, **first)
            return _build_run_record(
                connection.execute(select(models.run).where(c.id == key)).one()
            ), True

    def import_run(self, folder: Path | str) -> ImportedRun:
        """Makes a run again from the journal in its folder; one that is there is left alone.

        It is what it was, under its id where that is free. What could not be read of the journal
        is left out. A run that the journal leaves running is alive, or lost, by its last line.

        Raises:
            JournalError: the folder has no journal, or one that does not tell of a run.
        """
        folder = Path(folder).absolute()
        journal = read_journal(folder)
        with self.database.open_writer() as connection:
            key, created = import_journal(connection, journal, folder)
            query = select(models.run).where(models.run.c.id == key)
            run = _build_run_record(connection.execute(query).one())
        return ImportedRun(run, created, format_run_id(journal.run.fields["id"]), journal.left_out)

    def run(self, ref: str) -> RunRecord:
        """Returns a run by id, by "latest", or by a name that no other run has.

        Raises:
            NotFound: nothing answers to it; the message names the nearest ids.
            Ambiguous: several runs have that name.
        """
        with self.database.open_reader() as connection:
            key = find_key(connection, ref)
            return _build_run_record(
                connection.execute(select(models.run).where(models.run.c.id == key)).one()
            )

    def runs(
        self,
        *,
        name: str | None = None,
        group: str | None = None,
        status: str | None = None,
        limit: int | None = None,
    ) -> list[RunRecord]:
        """Returns runs, newest first; `status` is the effective one."""
        query = select(models.run).order_by(models.run.c.id.desc()).limit(limit)
        if name is not None:
            query = query.where(models.run.c.name == name)
        if group is not None:
            own = select(models.grouped.c.run_id).where(models.grouped.c.name == group)
            query = query.where(models.run.c.id.in_(own))
        if status is not None:
            require_statuses([status])
            query = query.where(has_status([status], time.time()))
        with self.database.open_reader() as connection:
            return [_build_run_record(row) for row in connection.execute(query)]

    def join(self, run_id: str, group: str) -> None:
        """Adds a run to a group, which there is from its first run on; to one it is in, nothing.

        A run may belong to any number of groups.
        """
        c = models.grouped.c
        with self.database.open_run_writer(run_id) as (connection, key):
            there = select(c.run_id).where(c.run_id == key, c.name == group)
            if connection.scalar(there) is None:
                record_change(connection, key, "grouped", name=group)

    def groups(self) -> dict[str, list[str]]:
        """Returns every group's run ids in the order in which they joined, by its name."""
        c = models.grouped.c
        found: dict[str, list[str]] = {}
        with self.database.open_reader() as connection:
            for row in connection.execute(select(c.name, c.run_id).order_by(c.at, c.run_id)):
                found.setdefault(row.name, []).append(format_run_id(row.run_id))
        return found

    def list_run_groups(self, run_id: str) -> list[str]:
        """Returns the names of the groups that a run belongs to, in the order it joined them."""
        c = models.grouped.c
        query = select(c.name).order_by(c.at, c.name)
        with self.database.open_run_reader(run_id) as (connection, key):
            return list(connection.scalars(query.where(c.run_id == key)))

    def update_run(
        self, run_id: str, **fields: str | int | Path | Mapping[str, str] | None
    ) -> None:
        """Sets plain columns: directory, origins, mlflow ids, host, pid, phase, steps_total, step.

        Raises:
            TypeError: a field is not one of these; status changes by `transition` alone.
        """
        if unknown := fields.keys() - UPDATABLE:
            raise TypeError(f"update_run cannot set {', '.join(sorted(unknown))}")
        if not fields:
            return
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in fields.items()}
        with self.database.open_run_writer(run_id) as (connection, key):
            record_change(connection, key, "set", **plain)

    def transition(
        self, run_id: str, expect: Collection[str], to: str, reason: str | None = None
    ) -> bool:
        """Moves a run to a status if, and only if, it is in one of `expect`.

        "running" counts an attempt and sets `started` (the first time); "submitted" is a sign of
        life as well; "queued" forgets `host` and `pid`; both clear `request`; ends set `ended`.
        The change goes into the history.

        Returns:
            False when the run was in none of them; nothing has changed then.
        """
        require_statuses([to, *expect])
        with self.database.open_run_writer(run_id) as (connection, key):
            return change_run_status(connection, key, expect, to, reason) is not None

    def start(
        self,
        run_id: str,
        expect: Collection[str],
        reason: str | None = None,
        *,
        devices: DeviceRequest | None = None,
    ) -> StartedAttempt | None:
        """Moves a run to "running" as `transition` does, for whoever will write it.

        Writers of the attempts before are refused from now on, and what those held of devices is
        free. Devices that are asked for are taken in the same transaction.

        Returns:
            None when the run was in none of `expect`.

        Raises:
            Busy: too few of the devices are free; nothing has changed then.
        """
        require_statuses(expect)
        with self.database.open_run_writer(run_id) as (connection, key):
            attempt = change_run_status(connection, key, expect, "running", reason)
            if attempt is None:
                return None
            taken = () if devices is None else claim_devices(connection, key, attempt, devices)
            return StartedAttempt(attempt, taken)

    def claim(
        self, expect: Collection[str], to: Status = "submitted", reason: str | None = None
    ) -> RunRecord | None:
        """Moves the oldest run whose effective status is in `expect`, as `transition` does.

        Any number of processes may claim at once: no two get the same run, and none waits for the
        other. A run that is lost may be claimed as such.

        Returns:
            The run, claimed; its `attempt` is the fencing token where it was moved to "running".
            None when none is left.
        """
        require_statuses([to, *expect])
        c = models.run.c
        oldest = select(c.id).where(has_status(expect, time.time())).order_by(c.id).limit(1)
        with self.database.open_writer() as connection:
            key = connection.scalar(oldest.with_for_update(skip_locked=True))
            if key is None:
                return None
            change_run_status(connection, key, STATUSES, to, reason)
            return _build_run_record(
                connection.execute(select(models.run).where(c.id == key)).one()
            )

    def leave_request(self, run_id: str, request: Request) -> bool:
        """Leaves a request for a run's supervisor, in `RunRecord.request`.

        Args:
            request: "stop", with a checkpoint, or "kill", at once, which no "stop" overrides.

        Returns:
            False when there is nobody to ask: the run has ended, or is queued.
        """
        if request not in REQUESTS:
            raise ValueError(f"no request {request!r}; there are {', '.join(REQUESTS)}")
        c = models.run.c
        with self.database.open_run_writer(run_id) as (connection, key):
            status, current = connection.execute(
                select(c.status, c.request).where(c.id == key)
            ).one()
            if status not in LIVING:
                return False
            if current != "kill":
                record_change(connection, key, "set", request=request)
            return True

    def history(self, run_id: str) -> list[StatusChange]:
        """Returns every change of status, oldest first."""
        c = models.status_change.c
        query = select(c.at, c.before, c.after, c.reason, c.attempt).order_by(c.id)
        with self.database.open_run_reader(run_id) as (connection, key):
            return [StatusChange(*row) for row in connection.execute(query.where(c.run_id == key))]

    def heartbeat(self, run_id: str) -> bool:
        """Says that a run is alive.

        Returns:
            False when the run is not submitted or running any more: whoever beats should stop. A
            writer's attempt is over as well once its run waits for the next one.
        """
        c, statuses = models.run.c, sorted(LIVING)
        if self.database.fence is not None:
            statuses = ["running"]
        with self.database.open_run_writer(run_id) as (connection, key):
            alive = update(models.run).where(c.id == key, c.status.in_(statuses))
            return connection.execute(alive.values(heartbeat=time.time())).rowcount == 1


def _build_run_record(row: Row[Any]) -> RunRecord:
    fields = dict(row._mapping)
    return RunRecord(**{**fields, "id": format_run_id(fields["id"])})
