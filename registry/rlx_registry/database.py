"""Transactions on the registry database, of either kind, and lookup of runs by id or name."""

import copy
import hashlib
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Self

from sqlalchemy import Connection, FromClause, Select, Table, func, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from rlx_registry import models
from rlx_registry.errors import (
    AmbiguousNameError,
    DatabaseUnavailableError,
    FencedError,
    NotFoundError,
)
from rlx_registry.postgres import Postgres
from rlx_registry.sqlite import Sqlite

RUN_REFERENCE = re.compile(r"(?:r-)?([0-9]{1,9})")
"""An id of a run, at most as large as the column of ids may hold."""


def select_backend(url: str) -> Sqlite | Postgres:
    """Returns the backend for a URL without opening it; errors do not repeat what may be a
    password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        subject = "the registry's URL" if "@" in url or "?" in url else repr(url)
        raise DatabaseUnavailableError(
            f"{subject} is not a database URL such as sqlite:///runs.db or "
            "postgresql+psycopg://user@host/database"
        ) from None
    kind = parsed.get_backend_name()
    if kind == "sqlite":
        return Sqlite.from_url(parsed)
    if kind == "postgresql":
        return Postgres.from_url(parsed)
    raise DatabaseUnavailableError(
        f"registry databases are SQLite or PostgreSQL, not {parsed.drivername!r}"
    )


def build_insert_if_absent(connection: Connection, table: Table) -> Any:
    """Returns an INSERT that skips rows already present."""
    return _start_insert(connection.dialect.name, table).on_conflict_do_nothing()


def _start_insert(dialect: str, table: Table) -> Any:
    return import_module(f"sqlalchemy.dialects.{dialect}").insert(table)


def build_upsert(connection: Connection, table: Table) -> Any:
    """Returns an INSERT that overwrites the row with the same primary key."""
    return _build_upsert(connection.dialect.name, table)


@cache  # making it costs more than running it
def _build_upsert(dialect: str, table: Table) -> Any:
    statement = _start_insert(dialect, table)
    fresh = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=fresh)


def acquire_named_lock(connection: Connection, name: str) -> None:
    """Holds a lock by name until the transaction ends; SQLite's writers are serialized anyway."""
    if connection.dialect.name == "postgresql":
        digest = hashlib.sha256(name.encode()).digest()
        key = int.from_bytes(digest[:8], signed=True)
        connection.execute(select(func.pg_advisory_xact_lock(key)))


def format_run_id(key: int) -> str:
    """Returns the public id of a run: 42 is "r-0042"."""
    return f"r-{key:04d}"


def select_fields(table: FromClause, record: type) -> Select[Any]:
    """Selects the columns that a dataclass names, in its order."""
    return select(*(table.c[name] for name in record.__dataclass_fields__))  # type: ignore[attr-defined]


class Database:
    """An open registry database; `open_reader()` and `open_writer()` are its transactions.

    Threads may share it, processes may not: open it after forking.
    """

    def __init__(self, url: str, *, create: bool, read_only: bool) -> None:
        self.url = url
        self._backend = select_backend(url)
        self.fence: tuple[int, int] | None = None
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
        """Returns this registry for one attempt of one run: a write of another raises `FencedError`
        and changes nothing. Connections are shared: close the registry, not its writers.

        Args:
            attempt: the fencing token that `Registry.start` returned.
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
        """Makes all writes of this thread in the block one transaction."""
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
            yield connection

    @contextmanager
    def open_run_reader(self, run_id: str) -> Iterator[tuple[Connection, int]]:
        with self.open_reader() as connection:
            yield connection, get_run_key(connection, run_id)

    def read_run_rows(self, run_id: str, table: Table, query: Select[Any]) -> Sequence[Any]:
        """Returns the rows of a query that are a run's, by the `run_id` of `table`."""
        with self.open_run_reader(run_id) as (connection, key):
            return connection.execute(query.where(table.c.run_id == key)).all()

    @contextmanager
    def open_run_writer(self, run_id: str) -> Iterator[tuple[Connection, int]]:
        with self.open_writer() as connection:
            key = get_run_key(connection, run_id, lock=True)
            if self.fence is not None:
                own, attempt = self.fence
                if key != own:
                    raise ValueError(
                        f"this writer may write only {format_run_id(own)}, not {format_run_id(key)}"
                    )
                c = models.run.c
                current = connection.scalar(select(c.attempt).where(c.id == key))
                if current != attempt:
                    raise FencedError(
                        f"run {format_run_id(key)} is at attempt {current} now: attempt {attempt} "
                        "has been taken over and can no longer write"
                    )
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
        query = select(c.id).where(c.id == key)
        if connection.scalar(query.with_for_update() if lock else query) is not None:
            return key
    raise _build_not_found_error(connection, run_id)


def get_run_keys(connection: Connection, run_ids: Collection[str]) -> dict[int, str]:
    """Returns run ids by the integers behind them, with one query for all; or raises
    NotFoundError."""
    matches = {one: RUN_REFERENCE.fullmatch(one) for one in run_ids}
    keys = {int(match[1]): one for one, match in matches.items() if match}
    c = models.run.c
    there = set(connection.scalars(select(c.id).where(c.id.in_(list(keys)))))
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
    named = select(table.c.id).where(table.c.name == ref).order_by(table.c.id.desc())
    keys = connection.scalars(named.limit(4)).all()
    if not keys:
        raise _build_not_found_error(connection, ref)
    if len(keys) > 1:
        names = ", ".join(map(format_run_id, keys[:3])) + ("…" if len(keys) > 3 else "")
        raise AmbiguousNameError(f"several runs are named {ref!r}: {names}")
    return int(keys[0])


def _build_not_found_error(connection: Connection, ref: str) -> NotFoundError:
    match = RUN_REFERENCE.fullmatch(ref)
    identity = models.run.c.id
    order = func.abs(identity - int(match[1])) if match else identity.desc()
    nearest = connection.scalars(select(identity).order_by(order, identity.desc()).limit(3)).all()
    if not nearest:
        return NotFoundError(f"no run {ref!r}: the registry has no runs yet")
    return NotFoundError(f"no run {ref!r}; nearest: {', '.join(map(format_run_id, nearest))}")
