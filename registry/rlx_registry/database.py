"""Transactions on the registry database, and lookup of runs by id or name."""

import copy
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

from sqlalchemy import BigInteger, ColumnElement, Connection, func, literal, select

from rlx_registry import models
from rlx_registry.changes import RunChange, TransactionChanges, get_transaction_changes
from rlx_registry.engine import select_backend
from rlx_registry.errors import (
    AmbiguousNameError,
    DatabaseUnavailableError,
    FencedError,
    NotFoundError,
)
from rlx_registry.journal import JournalWriter
from rlx_registry.snapshot import snapshot_run

__all__ = ["Database", "format_run_id"]

RUN_REFERENCE = re.compile(r"(?:r-)?([0-9]{1,15})")


def format_run_id(key: int) -> str:
    """Returns the public id of a run: 42 is "r-0042"."""
    return f"r-{key:04d}"


class Database:
    """An open registry database; `open_reader()` and `open_writer()` are its transactions.

    Threads may share it, processes may not: open it after forking.
    """

    def __init__(self, url: str, *, create: bool, read_only: bool) -> None:
        self.url = url
        self._backend = select_backend(url)
        self.fence: tuple[int, int] | None = None
        self._journals = JournalWriter()
        self._joint = threading.local()
        with self._backend.translate_errors():
            if not read_only:
                self._backend.prepare(create=create)
            self._writer = None if read_only else self._backend.engine("write")
            self._reader = self._backend.engine("read")
            try:
                self._backend.check(self._reader)
            except BaseException:
                self.close()
                raise

    @property
    def label(self) -> str:
        """The database's name in messages: the file, or the URL without its password."""
        return self._backend.label

    def close(self) -> None:
        """Closes every connection."""
        self._reader.dispose()
        if self._writer is not None:
            self._writer.dispose()

    def as_writer(self, run_id: str, attempt: int) -> Self:
        """Returns this database for one attempt of one run, with fenced writes.

        Every write checks the run's attempt in its own transaction. If it is not `attempt`, the
        write raises `FencedError` and changes nothing. Connections are shared: close the database,
        not its writers.

        Args:
            attempt: the fencing token that `Registry.start` returned.

        Raises:
            NotFoundError: there is no such run.
        """
        writer = copy.copy(self)
        writer._joint = threading.local()
        with self.open_run_reader(run_id) as (_, key):
            writer.fence = (key, attempt)
        return writer

    @contextmanager
    def open_reader(self) -> Iterator[Connection]:
        with self._backend.translate_errors(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def write_atomically(self) -> Iterator[None]:
        """Makes all writes of this thread in the block one transaction.

        Raises:
            DatabaseUnavailableError: the database cannot be written; nothing has been written.
        """
        with self.open_writer() as connection:
            self._joint.connection = connection
            try:
                yield
            finally:
                self._joint.connection = None

    @contextmanager
    def open_writer(self) -> Iterator[Connection]:
        if (joint := getattr(self._joint, "connection", None)) is not None:
            yield joint
            return
        if self._writer is None:
            raise DatabaseUnavailableError(f"registry {self.label} is open for reading only")
        with (
            self._backend.translate_errors(),
            self._backend.hold_write_turn(),
            self._writer.begin() as connection,
        ):
            found = connection.info["rlx"] = TransactionChanges()
            yield connection
            _find_changed_folders(connection, found)
        self._append_to_journals(found)

    def _append_to_journals(self, found: TransactionChanges) -> None:
        for key, changes in found.changes.items():
            directory = found.directories[key]
            if directory is not None:
                self._journals.add(Path(directory), changes, partial(self._snapshot, key))

    def _snapshot(self, key: int) -> Iterator[RunChange]:
        with self.open_reader() as connection:
            yield from snapshot_run(connection, key)

    @contextmanager
    def open_run_reader(self, run_id: str) -> Iterator[tuple[Connection, int]]:
        with self.open_reader() as connection:
            yield connection, get_run_key(connection, run_id)

    @contextmanager
    def open_run_writer(self, run_id: str) -> Iterator[tuple[Connection, int]]:
        with self.open_writer() as connection:
            key = get_run_key(connection, run_id, lock=True)
            if self.fence is not None:
                _require_current_attempt(connection, key, *self.fence)
            yield connection, key


def get_run_key(connection: Connection, run_id: str, *, lock: bool = False) -> int:
    """Returns the integer behind an id such as "r-0042", "r-42" or "42".

    Args:
        lock: block other writers of this run until the transaction ends; SQLite always does.

    Raises:
        NotFoundError: there is no such run; the message names the nearest ids.
    """
    if match := RUN_REFERENCE.fullmatch(run_id):
        key = int(match[1])
        c = models.run.c
        query = select(c.id, c.directory).where(c.id == _build_bigint_literal(key))
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        if row is not None:
            if lock:
                get_transaction_changes(connection).directories[key] = row.directory
            return key
    raise _build_not_found_error(connection, run_id)


def get_run_keys(connection: Connection, run_ids: Collection[str]) -> dict[int, str]:
    """Returns run ids by the integers behind them, with one query for all.

    Raises:
        NotFoundError: there is no such run.
    """
    matches = {one: RUN_REFERENCE.fullmatch(one) for one in run_ids}
    keys = {int(match[1]): one for one, match in matches.items() if match}
    c = models.run.c
    there = set(
        connection.scalars(
            select(c.id).where(c.id.in_([_build_bigint_literal(key) for key in keys]))
        )
    )
    for one, match in matches.items():
        if match is None or int(match[1]) not in there:
            raise _build_not_found_error(connection, one)
    return keys


def find_key(connection: Connection, ref: str) -> int:
    """Returns the integer behind an id, "latest", or the name of exactly one run.

    Raises:
        NotFoundError: no run matches.
        AmbiguousNameError: several runs have that name.
    """
    if RUN_REFERENCE.fullmatch(ref):
        return get_run_key(connection, ref)
    table = models.run
    if ref == "latest":
        newest = connection.scalar(select(func.max(table.c.id)))
        if newest is None:
            raise _build_not_found_error(connection, ref)
        return int(newest)
    keys = connection.scalars(
        select(table.c.id).where(table.c.name == ref).order_by(table.c.id.desc()).limit(4)
    ).all()
    if not keys:
        raise _build_not_found_error(connection, ref)
    if len(keys) > 1:
        names = ", ".join(format_run_id(key) for key in keys[:3]) + ("…" if len(keys) > 3 else "")
        raise AmbiguousNameError(f"several runs are named {ref!r}: {names}")
    return int(keys[0])


def _find_changed_folders(connection: Connection, found: TransactionChanges) -> None:
    """Adds the folders of runs that the transaction changed without having locked them."""
    c = models.run.c
    unknown = [key for key in found.changes if key not in found.directories]
    if unknown:
        rows = connection.execute(select(c.id, c.directory).where(c.id.in_(unknown)))
        found.directories.update((row.id, row.directory) for row in rows)


def _require_current_attempt(connection: Connection, key: int, own: int, attempt: int) -> None:
    if key != own:
        raise ValueError(
            f"this writer may write only {format_run_id(own)}, not {format_run_id(key)}"
        )
    c = models.run.c
    current = connection.scalar(select(c.attempt).where(c.id == key))
    if current != attempt:
        raise FencedError(
            f"run {format_run_id(key)} is at attempt {current} now: attempt {attempt} has been "
            "taken over and can no longer write"
        )


def _build_not_found_error(connection: Connection, ref: str) -> NotFoundError:
    match = RUN_REFERENCE.fullmatch(ref)
    identity = models.run.c.id
    order = func.abs(identity - _build_bigint_literal(int(match[1]))) if match else identity.desc()
    nearest = connection.scalars(select(identity).order_by(order, identity.desc()).limit(3)).all()
    if not nearest:
        return NotFoundError(f"no run {ref!r}: the registry has no runs yet")
    return NotFoundError(f"no run {ref!r}; nearest: {', '.join(map(format_run_id, nearest))}")


def _build_bigint_literal(key: int) -> ColumnElement[int]:
    """A number typed by a user as an SQL literal; it may exceed the id column's range."""
    return literal(key, BigInteger)
