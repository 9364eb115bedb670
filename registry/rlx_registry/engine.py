"""Engines over one database, and its schema.

SQLite needs care: with the driver's defaults two processes can claim the same row, and a
transaction that begins by reading may fail to become a writer however long it waits. So writers
say BEGIN IMMEDIATE over a write-ahead log, and readers have an engine of their own that cannot
write, hence can never lock a writer out.
"""

import errno
import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, inspect, text
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, StatementError

from rlx_registry.errors import RegistryError, SchemaError, Unavailable, Unwritable
from rlx_registry.models import VERSION_TABLE

__all__ = ["REVISIONS", "connect", "database_path", "prepare", "translated", "upsert"]

REVISIONS = ("0001", "0002")
"""Schema revisions this code knows, oldest first; the last is the one it uses."""

MIGRATIONS = Path(__file__).parent / "migrations"

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
SMALLEST = 64 * 1024
"""Bytes without which SQLite cannot even keep the index of its log."""

Mode = Literal["read", "write", "migrate"]


def database_path(url: str) -> Path:
    """Returns the file behind a `sqlite:///path` URL.

    Raises:
        Unavailable: the URL is malformed, names another kind of database, or no file.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise Unavailable(f"{url!r} is not a database URL such as sqlite:///runs.db") from error
    if parsed.get_backend_name() != "sqlite":
        raise Unavailable(f"registry databases are SQLite files, not {parsed.drivername!r}")
    if parsed.database in (None, "", ":memory:") or parsed.query:
        raise Unavailable(f"{url!r} names no file; write sqlite:///path/to/registry.db")
    return Path(str(parsed.database)).absolute()


def connect(path: Path, mode: Mode) -> Engine:
    """Returns an engine for one purpose; opens nothing yet.

    "migrate" is "write" without foreign keys, which SQLite must not check while tables are rebuilt.
    """
    query = {"mode": {"read": "ro", "write": "rw", "migrate": "rwc"}[mode], "uri": "true"}
    if mode == "read" and _is_archive(path):
        query["immutable"] = "1"
    url = URL.create("sqlite", database=f"file:{quote(str(path))}", query=query)
    engine = create_engine(url, json_serializer=_to_json)
    pragmas = ["busy_timeout=15000", "synchronous=NORMAL"]
    pragmas += ["foreign_keys=ON"] if mode == "write" else []
    pragmas += ["query_only=ON"] if mode == "read" else []

    @event.listens_for(engine, "connect")
    def _connected(dbapi: Any, _record: object) -> None:
        dbapi.isolation_level = None  # the driver would begin too late; the next listener begins
        for pragma in pragmas:
            dbapi.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN" if mode == "read" else "BEGIN IMMEDIATE")

    return engine


def _is_archive(path: Path) -> bool:
    """Whether nobody can write here: readers of a live log need to, those of a still file not."""
    log = path.with_name(f"{path.name}-wal")
    return not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)


def prepare(path: Path, *, create: bool) -> None:
    """Makes the file ready for writing: created, in WAL mode, at the newest revision.

    Processes that come at once take turns. An older database is copied beside itself first.

    Raises:
        Unavailable: there is no file and `create` is false, or it cannot be opened; Unwritable
            where the file system is the reason.
        SchemaError: the file belongs to a newer version, or is not a registry.
    """
    if not create and not path.exists():
        raise Unavailable(f"there is no registry at {path}")
    with translated(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_name(f"{path.name}.lock").open("w")
        except OSError as error:
            if error.errno in REFUSALS:
                raise Unwritable(path, error.errno, str(error.strerror)) from error
            raise Unavailable(f"cannot write registry {path}: {error}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            engine = connect(path, "migrate")
            try:
                _write_ahead(engine)
                _migrate(engine, path)
            finally:
                engine.dispose()


def check(engine: Engine, path: Path) -> None:
    """Sees that a database is one that this code can read.

    Raises:
        SchemaError: it is newer, older, or not a registry.
    """
    with translated(path), engine.connect() as connection:
        revision = _revision(connection, path)
    if revision is None:
        raise SchemaError(f"{path} is no registry of runs: it has none of the tables of one")
    if revision != REVISIONS[-1]:
        raise SchemaError(
            f"registry {path} is at revision {revision}, this version reads {REVISIONS[-1]}; "
            "opening it once for writing upgrades it"
        )


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns the driver's errors into the registry's own."""
    try:
        yield
    except sqlite3.Error as error:  # before a connection is SQLAlchemy's
        raise _unavailable(path, error) from error
    except StatementError as error:
        if isinstance(error, DBAPIError) and not isinstance(error, IntegrityError):
            raise _unavailable(path, error.orig) from error
        raise RegistryError(f"registry {path} refuses the record: {error.orig}") from error


def _unavailable(path: Path, error: BaseException | None) -> Unavailable:
    """The error for what SQLite said, with the file system's part in it told apart."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest says more than is asked here
    unopened = code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
    if code == sqlite3.SQLITE_FULL or (unopened and _free(path) < SMALLEST):
        return Unwritable(path, errno.ENOSPC, str(error))
    if code == sqlite3.SQLITE_READONLY or (unopened and not os.access(path.parent, os.W_OK)):
        return Unwritable(path, errno.EROFS, str(error))
    return Unavailable(f"registry {path}: {error}")


def _free(path: Path) -> int:
    """Bytes free on the disk of a database; plenty where nobody can say."""
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return SMALLEST


def upsert(table: Table) -> Insert:
    """Returns an INSERT that overwrites the row with the same primary key."""
    statement = insert(table)
    fresh = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=fresh)


def _write_ahead(engine: Engine) -> None:
    # The journal mode cannot change inside a transaction, and every SQLAlchemy connection is one.
    raw = engine.raw_connection()
    try:
        raw.cursor().execute("PRAGMA journal_mode=WAL")
    finally:
        raw.close()


def _revision(connection: Connection, path: Path) -> str | None:
    """Returns the revision a database is at; None for an empty one."""
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        if any(name.startswith("rlx_") for name in tables):
            raise SchemaError(f"{path} has tables of a registry but no revision")
        return None
    revision: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if revision is not None and revision not in REVISIONS:
        raise SchemaError(
            f"registry {path} is at revision {revision}, which a newer version of rlx wrote; "
            f"this one knows up to {REVISIONS[-1]}"
        )
    return revision


def _migrate(engine: Engine, path: Path) -> None:
    with engine.connect() as connection:
        revision = _revision(connection, path)
    if revision == REVISIONS[-1]:
        return
    if revision is not None:
        _back_up(engine, path.with_name(f"{path.name}-{revision}.bak"))

    from alembic import command  # half a second that only a new or old database costs
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        if broken:
            raise SchemaError(f"upgrading {path} would break {len(broken)} references; not done")


def _back_up(engine: Engine, target: Path) -> None:
    target.unlink(missing_ok=True)  # left by an upgrade that did not finish
    raw = engine.raw_connection()
    try:
        raw.cursor().execute("VACUUM INTO ?", (str(target),))
    finally:
        raw.close()


def _to_json(value: object) -> str:
    return json.dumps(value, allow_nan=False, default=_scalar, separators=(",", ":"))


def _scalar(value: Any) -> object:
    """Unwraps NumPy scalars and one-element tensors; refuses everything else."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON; the registry stores plain values")
