"""The public registry class: runs and their status, results, queries and machines."""

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import insert, select, update

from rlx_registry import models
from rlx_registry.changes import SETTABLE, record_change
from rlx_registry.database import Database, find_key, format_run_id
from rlx_registry.engine import acquire_named_lock, select_backend
from rlx_registry.journal_import import import_journal, read_journal
from rlx_registry.machines import Machines, claim_devices
from rlx_registry.notes import Notes
from rlx_registry.plugin_records import find_changed_plugins
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
from rlx_registry.run_lists import RunFilter, RunLists, build_run_record
from rlx_registry.states import (
    change_run_status,
    has_status,
    is_as_seen,
    is_blocking,
    require_statuses,
)

__all__ = ["BLOCKING", "Registry"]

UPDATABLE = SETTABLE - {"request"}
BLOCKING: tuple[Status, ...] = ("finished", "queued", "submitted", "running")
"""Statuses of a run that need not be submitted again."""


class Registry:
    """A registry of runs. Use as a context manager, or call `close()`.

    Run ids in arguments are "r-0042", "r-42" or "42"; every method that takes one raises
    NotFoundError if there is no such run. Methods may be called from any thread.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.results = RunResults(database)
        self.queries = Queries(database)
        self.lists = RunLists(database)
        self.machines = Machines(database)
        self.notes = Notes(database)

    @classmethod
    def open(cls, url: str, *, create: bool = True, read_only: bool = False) -> Self:
        """Opens a registry; creates it if it does not exist, unless read-only.

        An older SQLite file is backed up and upgraded. An older PostgreSQL database is refused,
        because other machines may be using it: see `upgrade`.

        Args:
            url: `sqlite:///path` or `postgresql+psycopg://user@host/database`.
            create: create a missing database.
            read_only: open for reading only.

        Raises:
            DatabaseUnavailableError: there is no database (`create=False` or read-only), or it
                cannot be opened.
            SchemaError: it was written by a newer version, is not a registry, or is older and not
                upgraded automatically.
        """
        return cls(Database(url, create=create, read_only=read_only))

    def as_writer(self, run_id: str, attempt: int) -> Self:
        """Returns this registry for one attempt of one run, with fenced writes.

        See `Database.as_writer`. Connections are shared: close the registry, not its writers.

        Raises:
            NotFoundError: there is no such run.
        """
        return type(self)(self.database.as_writer(run_id, attempt))

    @property
    def url(self) -> str:
        """The registry's URL."""
        return self.database.url

    @property
    def label(self) -> str:
        """The database's name in messages: the file, or the URL without its password."""
        return self.database.label

    def write_atomically(self) -> AbstractContextManager[None]:
        """Makes all writes of this thread in the block one transaction.

        Raises:
            DatabaseUnavailableError: the database cannot be written; nothing has been written.
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
        """Upgrades a registry to the newest revision; an SQLite file is backed up beside itself.

        Returns:
            The previous revision (None for a PostgreSQL database without a registry), and the
            current one.

        Raises:
            DatabaseUnavailableError: there is no file, or the database cannot be opened.
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
        """Records a run, or returns the newest existing one that is the same.

        The same are runs with equal digest, seed and name whose plugins had the same version,
        source and data. Failed, stopped and lost runs do not count as existing.

        Args:
            again: always create a new run.
            queue: create the run as "queued", for a worker to claim, instead of "submitted".

        Returns:
            The run, and whether it was created now.
        """
        with self.database.open_writer() as connection:
            # No other process can insert this pair between the query and the insertion.
            acquire_named_lock(connection, f"rlx submit {digest} {seed}")
            c, now = models.run.c, time.time()
            alike = select(models.run).where(c.digest == digest, c.seed == seed, c.name == name)
            alike = alike.where(is_blocking(connection, BLOCKING, now)).order_by(c.id.desc())
            for row in () if again else connection.execute(alike).all():
                if not find_changed_plugins(plugins, row.plugins):
                    return build_run_record(row), False
            values = {"digest": digest, "seed": seed, "name": name, "spec": spec, "yaml": yaml}
            values |= {"plugins": plugins, "code": code, "environment": environment}
            status: Status = "queued" if queue else "submitted"
            key = connection.execute(
                insert(models.run).returning(c.id),
                {**values, "status": status, "created": now},
            ).scalar_one()
            first = {"before": None, "after": status, "reason": None, "attempt": 0}
            record_change(connection, key, "moved", now, **first)
            return build_run_record(
                connection.execute(select(models.run).where(c.id == key)).one()
            ), True

    def import_run(self, folder: Path | str) -> ImportedRun:
        """Restores a run from the journal in its folder, unless the registry already has it.

        The run keeps its former id if that is free. Unreadable lines of the journal are left out.
        If the journal ends with the run still running, the time of its last sign of life decides
        whether the run counts as lost.

        Raises:
            JournalError: the folder has no journal, or the journal does not describe a run.
        """
        folder = Path(folder).absolute()
        journal = read_journal(folder)
        with self.database.open_writer() as connection:
            key, created, refused = import_journal(connection, journal, folder)
            query = select(models.run).where(models.run.c.id == key)
            run = build_run_record(connection.execute(query).one())
        left_out = (*journal.left_out, *refused)
        return ImportedRun(run, created, format_run_id(journal.run.fields["id"]), left_out)

    def run(self, ref: str) -> RunRecord:
        """Returns a run by id, by "latest", or by a unique name.

        Raises:
            NotFoundError: no run matches; the message names the nearest ids.
            AmbiguousNameError: several runs have that name.
        """
        with self.database.open_reader() as connection:
            key = find_key(connection, ref)
            return build_run_record(
                connection.execute(select(models.run).where(models.run.c.id == key)).one()
            )

    def runs(
        self,
        *,
        name: str | None = None,
        group: str | None = None,
        status: str | None = None,
        digest: str | None = None,
        limit: int | None = None,
    ) -> list[RunRecord]:
        """Returns runs, newest first; `status` is the effective one."""
        statuses = () if status is None else (status,)
        wanted = RunFilter(name=name, group=group, digest=digest, statuses=statuses)
        return self.lists.select(wanted, limit)

    def join(self, run_id: str, group: str) -> None:
        """Adds a run to a group; does nothing if it is already a member.

        A group exists once it has a run. A run may belong to any number of groups.
        """
        c = models.grouped.c
        with self.database.open_run_writer(run_id) as (connection, key):
            there = select(c.run_id).where(c.run_id == key, c.name == group)
            if connection.scalar(there) is None:
                record_change(connection, key, "grouped", name=group)

    def groups(self) -> dict[str, list[str]]:
        """Returns the run ids of every group by its name, in the order in which they joined."""
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
        """Sets columns: directory, origins, mlflow ids, host, pid, phase, steps_total, step.

        Raises:
            TypeError: a field is not one of these; use `transition` to change the status.
        """
        if unknown := fields.keys() - UPDATABLE:
            raise TypeError(f"update_run cannot set {', '.join(sorted(unknown))}")
        if not fields:
            return
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in fields.items()}
        with self.database.open_run_writer(run_id) as (connection, key):
            record_change(connection, key, "set", **plain)

    def transition(
        self,
        run_id: str,
        expect: Collection[str],
        to: str,
        reason: str | None = None,
        *,
        seen: RunRecord | None = None,
    ) -> bool:
        """Moves a run to a status if and only if it is in one of `expect`.

        "running" increments `attempt` and, the first time, sets `started`. "running" and
        "submitted" count as a heartbeat. "queued" and "submitted" clear `request`, `host` and
        `pid`. A status of `ENDED` sets `ended`. The change is added to the history.

        Args:
            seen: the run as it was read, which nobody may have changed since; None for any.

        Returns:
            False if the run was in none of them, or has changed; nothing has changed then.
        """
        require_statuses([to, *expect])
        with self.database.open_run_writer(run_id) as (connection, key):
            if seen is not None and not is_as_seen(connection, key, seen):
                return False
            return change_run_status(connection, key, expect, to, reason) is not None

    def start(
        self,
        run_id: str,
        expect: Collection[str],
        reason: str | None = None,
        *,
        devices: DeviceRequest | None = None,
    ) -> StartedAttempt | None:
        """Starts a new attempt: moves a run to "running" as `transition` does.

        Writers of earlier attempts are fenced from now on, and their devices are free. The
        requested devices are taken in the same transaction.

        Returns:
            None if the run was in none of `expect`.

        Raises:
            DevicesBusyError: too few of the devices are free; nothing has changed then.
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
        """Claims the oldest run whose effective status is in `expect`, as `transition` does.

        Any number of processes may claim at once: no two get the same run. A lost run can be
        claimed by the status "lost".

        Returns:
            The claimed run; if it was moved to "running", its `attempt` is the fencing token.
            None if no such run is left.
        """
        require_statuses([to, *expect])
        c = models.run.c
        with self.database.open_writer() as connection:
            fitting = has_status(connection, expect, time.time())
            oldest = select(c.id).where(fitting).order_by(c.id).limit(1)
            key = connection.scalar(oldest.with_for_update(skip_locked=True))
            if key is None:
                return None
            change_run_status(connection, key, STATUSES, to, reason)
            return build_run_record(connection.execute(select(models.run).where(c.id == key)).one())

    def leave_request(self, run_id: str, request: Request) -> bool:
        """Leaves a request for a run's supervisor, in `RunRecord.request`.

        Args:
            request: "stop" (after writing a checkpoint) or "kill" (at once). A later "stop" does
                not override a "kill".

        Returns:
            False if the run has no supervisor, because it has ended or is queued.
        """
        if request not in REQUESTS:
            raise ValueError(f"unknown request {request!r}; known: {', '.join(REQUESTS)}")
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
        """Records a heartbeat of a run.

        Returns:
            False if the run is no longer submitted or running: the caller should stop. For a writer
            of one attempt, also False if the run is submitted, i.e. waits for its next attempt.
        """
        c, statuses = models.run.c, sorted(LIVING)
        if self.database.fence is not None:
            statuses = ["running"]
        with self.database.open_run_writer(run_id) as (connection, key):
            alive = update(models.run).where(c.id == key, c.status.in_(statuses))
            return connection.execute(alive.values(heartbeat=time.time())).rowcount == 1
