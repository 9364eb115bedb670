"""Selects the database backend of a URL, and builds statements that differ between backends."""

import hashlib
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Literal, Protocol

from sqlalchemy import Column, Connection, Engine, Table, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from rlx_registry.errors import DatabaseUnavailableError
from rlx_registry.postgres import Postgres
from rlx_registry.sqlite import Sqlite

__all__ = [
    "Backend",
    "acquire_named_lock",
    "advance_sequence",
    "build_insert_if_absent",
    "build_upsert",
    "select_backend",
]

_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class Backend(Protocol):
    """An SQLite or PostgreSQL database; every method may raise `RegistryDatabaseError`."""

    @property
    def label(self) -> str: ...
    def engine(self, mode: Literal["read", "write"]) -> Engine: ...
    def prepare(self, *, create: bool) -> None: ...
    def check(self, reader: Engine) -> None: ...
    def upgrade(self) -> tuple[str | None, str]: ...
    def hold_write_turn(self) -> AbstractContextManager[None]: ...
    def translate_errors(self) -> AbstractContextManager[None]: ...


def select_backend(url: str) -> Backend:
    """Returns the backend for a URL without opening the database.

    Raises:
        DatabaseUnavailableError: the URL is malformed, or names another kind of database. The
            message does not repeat text that may contain a password.
    """
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
    return _INSERTS[connection.dialect.name](table).on_conflict_do_nothing()


def build_upsert(connection: Connection, table: Table) -> Any:
    """Returns an INSERT that overwrites the row with the same primary key."""
    return _build_upsert(connection.dialect.name, table)


@cache  # making it costs more than running it
def _build_upsert(dialect: str, table: Table) -> Any:
    statement = _INSERTS[dialect](table)
    fresh = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=fresh)


def acquire_named_lock(connection: Connection, name: str) -> None:
    """Holds a lock by name until the transaction ends; SQLite's writers are serialized anyway."""
    if connection.dialect.name == "postgresql":
        digest = hashlib.sha256(name.encode()).digest()
        key = int.from_bytes(digest[:8], signed=True)
        connection.execute(select(func.pg_advisory_xact_lock(key)))


def advance_sequence(connection: Connection, column: "Column[int]", number: int) -> None:
    """Advances a column's sequence past a number that was inserted explicitly.

    SQLite does so by itself.
    """
    if connection.dialect.name == "postgresql":
        sequence = "pg_get_serial_sequence(:table, :column)"
        last = f"coalesce(pg_sequence_last_value({sequence}::regclass), 1)"
        statement = text(f"SELECT setval({sequence}, greatest(:number, {last}))")
        names = {"table": column.table.name, "column": column.name}
        connection.execute(statement, {**names, "number": number})
