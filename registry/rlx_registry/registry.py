"""The public registry class: runs and their status, groups and devices."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self, Unpack

from sqlalchemy import delete, func, insert, select, update

from rlx_registry import models
from rlx_registry.database import (
    Database,
    acquire_named_lock,
    build_insert_if_absent,
    find_key,
    format_run_id,
    select_fields,
)
from rlx_registry.machines import claim_devices, list_held_devices
from rlx_registry.plugin_records import find_changed_plugins
from rlx_registry.queries import Queries, RunFilter, build_run_conditions
from rlx_registry.records import (
    LIVING,
    REQUESTS,
    DeviceRecord,
    DeviceRequest,
    Request,
    RunRecord,
    StartedAttempt,
    Status,
    StatusChange,
)
from rlx_registry.results import RunResults
from rlx_registry.states import (
    build_run,
    change_run_status,
    is_as_seen,
    require_ended,
    require_statuses,
    write_status,
)
from rlx_registry.supervisors import is_supervisor_alive

UPDATABLE = frozenset(
    {"directory", "mlflow_run_id", "mlflow_experiment_id", "host", "pid", "phase", "step"}
    | {"steps_total", "origins"}
)
"""Columns of a run that `Registry.update_run` sets."""
BLOCKING: tuple[Status, ...] = ("finished", "queued", "submitted", "running")
"""Statuses of a run that need not be submitted again."""


class Registry(Database):
    """A registry of runs. Use as a context manager, or call `close()`.

    Run ids in arguments are "r-0042", "r-42" or "42"; every method that takes one raises
    NotFoundError if there is no such run. Methods may be called from any thread.
    """

    @classmethod
    def open(cls, url: str, *, create: bool = True, read_only: bool = False) -> Self:
        """Opens a registry; creates it if it does not exist, unless read-only.

        Args:
            url: `sqlite:///path` or `postgresql+psycopg://user@host/database`.

        Raises:
            DatabaseUnavailableError: there is no database (`create=False` or read-only), or it
                cannot be opened.
            SchemaError: another version wrote it, or it is not a registry.
        """
        return cls(url, create=create, read_only=read_only)

    @property
    def results(self) -> RunResults:
        """Metrics, events, evaluations, files and rollouts of runs."""
        return RunResults(self)

    @property
    def queries(self) -> Queries:
        """Lists of runs, and pages about one."""
        return Queries(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        source and data. Failed, stopped and lost runs do not count as existing, but one whose
        supervisor has just gone does: who submits it again is to record that first.

        Args:
            again: always create a new run.
            queue: create the run as "queued", for a worker to claim, instead of "submitted".

        Returns:
            The run, and whether it was created now.
        """
        with self.open_writer() as connection:
            # No other process can insert this pair between the query and the insertion.
            acquire_named_lock(connection, f"rlx submit {digest} {seed}")
            c, now = models.run.c, time.time()
            alike = select(models.run).where(c.digest == digest, c.seed == seed, c.name == name)
            alike = alike.where(c.status.in_(BLOCKING)).order_by(c.id.desc())
            for row in () if again else connection.execute(alike).all():
                run = build_run(RunRecord, row)
                is_silent = run.status in LIVING and run.is_silent
                if is_silent and not is_supervisor_alive(run.directory):
                    continue
                if not find_changed_plugins(plugins, run.plugins):
                    return run, False
            values = {"digest": digest, "seed": seed, "name": name, "spec": spec, "yaml": yaml}
            values |= {"plugins": plugins, "code": code, "environment": environment}
            status: Status = "queued" if queue else "submitted"
            key = connection.execute(
                insert(models.run).returning(c.id),
                {**values, "status": status, "created": now},
            ).scalar_one()
            write_status(connection, key, before=None, after=status, attempt=0, at=now)
            return build_run(
                RunRecord, connection.execute(select(models.run).where(c.id == key)).one()
            ), True

    def run(self, ref: str) -> RunRecord:
        """Returns a run by id, by "latest", or by a unique name.

        Raises:
            NotFoundError: no run matches; the message names the nearest ids.
            AmbiguousNameError: several runs have that name.
        """
        with self.open_reader() as connection:
            key = find_key(connection, ref)
            return build_run(
                RunRecord,
                connection.execute(select(models.run).where(models.run.c.id == key)).one(),
            )

    def runs(self, *, limit: int | None = None, **wanted: Unpack[RunFilter]) -> list[RunRecord]:
        """Returns the runs that meet every condition, newest first, and at most `limit` of them."""
        query = select(models.run).order_by(models.run.c.id.desc()).limit(limit)
        with self.open_reader() as connection:
            query = query.where(*build_run_conditions(connection, wanted))
            return [build_run(RunRecord, row) for row in connection.execute(query)]

    def count_runs(self, **wanted: Unpack[RunFilter]) -> int:
        """Returns how many runs meet every condition; see `runs`."""
        query = select(func.count()).select_from(models.run)
        with self.open_reader() as connection:
            query = query.where(*build_run_conditions(connection, wanted))
            return int(connection.scalar(query) or 0)

    def join(self, run_id: str, group: str) -> None:
        """Adds a run to a group, which exists once it has a run; does nothing if it is a member."""
        with self.open_run_writer(run_id) as (connection, key):
            row = {"run_id": key, "name": group, "at": time.time()}
            connection.execute(build_insert_if_absent(connection, models.grouped), row)

    def groups(self) -> dict[str, list[str]]:
        """Returns the run ids of every group by its name, in the order in which they joined."""
        c = models.grouped.c
        found: dict[str, list[str]] = {}
        with self.open_reader() as connection:
            for row in connection.execute(select(c.name, c.run_id).order_by(c.at, c.run_id)):
                found.setdefault(row.name, []).append(format_run_id(row.run_id))
        return found

    def update_run(
        self, run_id: str, **fields: str | int | Path | Mapping[str, str] | None
    ) -> None:
        """Sets columns of `UPDATABLE`; `transition` changes the status."""
        if unknown := fields.keys() - UPDATABLE:
            raise TypeError(f"update_run cannot set {', '.join(sorted(unknown))}")
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in fields.items()}
        with self.open_run_writer(run_id) as (connection, key):
            connection.execute(update(models.run).where(models.run.c.id == key).values(plain))

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
        with self.open_run_writer(run_id) as (connection, key):
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
        """Starts a new attempt: moves a run to "running" as `transition` does, and takes the
        requested devices in the same transaction. Writers of earlier attempts are fenced from now
        on, and their devices are free.

        Returns:
            None if the run was in none of `expect`.

        Raises:
            DevicesBusyError: too few of the devices are free; nothing has changed then.
        """
        require_statuses(expect)
        with self.open_run_writer(run_id) as (connection, key):
            attempt = change_run_status(connection, key, expect, "running", reason)
            if attempt is None:
                return None
            taken = () if devices is None else claim_devices(connection, key, attempt, devices)
            return StartedAttempt(attempt, taken)

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
        with self.open_run_writer(run_id) as (connection, key):
            status, current = connection.execute(
                select(c.status, c.request).where(c.id == key)
            ).one()
            if status not in LIVING:
                return False
            if current != "kill":
                connection.execute(update(models.run).where(c.id == key).values(request=request))
            return True

    def devices(self, host: str | None = None) -> list[DeviceRecord]:
        """Returns the devices currently held, of one machine or of all, sorted by name."""
        with self.open_reader() as connection:
            return list_held_devices(connection, host)

    def history(self, run_id: str) -> list[StatusChange]:
        """Returns every change of status, oldest first."""
        table = models.status_change
        query = select_fields(table, StatusChange).order_by(table.c.id)
        return [StatusChange(*row) for row in self.read_run_rows(run_id, table, query)]

    def heartbeat(self, run_id: str) -> bool:
        """Records a heartbeat of a run; False if it is no longer submitted or running, or for a
        writer of one attempt waits for its next: the caller should stop."""
        c, statuses = models.run.c, sorted(LIVING)
        if self.fence is not None:
            statuses = ["running"]
        with self.open_run_writer(run_id) as (connection, key):
            alive = update(models.run).where(c.id == key, c.status.in_(statuses))
            return connection.execute(alive.values(heartbeat=time.time())).rowcount == 1

    def delete_run(self, run_id: str) -> None:
        """Deletes every row of a run; its id is not used again. ValueError unless the run has
        ended."""
        with self.open_run_writer(run_id) as (connection, key):
            require_ended(connection, key)
            for table in reversed(models.metadata.sorted_tables):
                if table is not models.run and "run_id" in table.c:
                    connection.execute(delete(table).where(table.c.run_id == key))
            connection.execute(delete(models.run).where(models.run.c.id == key))

    def delete_rollouts(self, run_id: str) -> None:
        """Deletes the index of a run's rollouts, and where their files are. ValueError unless it
        has ended."""
        with self.open_run_writer(run_id) as (connection, key):
            require_ended(connection, key)
            for table in (models.rollout, models.rollout_step):
                connection.execute(delete(table).where(table.c.run_id == key))
