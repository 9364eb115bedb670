"""A registry in one SQLite file.

SQLite needs care: with the driver's defaults two processes can claim the same row, and a
transaction that begins by reading may fail to become a writer however long it waits. So writers
say BEGIN IMMEDIATE over a write-ahead log, and readers have an engine of their own that cannot
write, hence can never lock a writer out.
"""

import errno
import fcntl
import logging
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TextIO
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError

from rlx_registry import file_systems, schema
from rlx_registry.column_values import encode_plain_json
from rlx_registry.errors import (
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    RegistryDatabaseError,
    SchemaError,
)

__all__ = ["Sqlite"]

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
SMALLEST = 64 * 1024
"""Bytes without which SQLite cannot even keep the index of its log."""
PATIENCE = 60.0
"""Seconds that a writer waits for its turn."""
REMEDY = "opening it once for writing upgrades it"

Mode = Literal["read", "write", "migrate"]


@dataclass(frozen=True, slots=True)
class Sqlite:
    """One SQLite file, absolute."""

    path: Path

    @classmethod
    def from_url(cls, url: URL) -> "Sqlite":
        """The file behind a `sqlite:///path` URL.

        Raises:
            Unavailable: it names no file.
        """
        if url.database in (None, "", ":memory:") or url.query:
            raise DatabaseUnavailableError(
                f"'{url}' names no file; write sqlite:///path/to/registry.db"
            )
        return cls(Path(str(url.database)).absolute())

    @property
    def label(self) -> str:
        """The database as messages name it."""
        return str(self.path)

    def engine(self, mode: Mode) -> Engine:
        """Returns an engine for one purpose; opens nothing yet.

        "migrate" is "write" without foreign keys, which SQLite must not check while tables are
        rebuilt.
        """
        query = {"mode": {"read": "ro", "write": "rw", "migrate": "rwc"}[mode], "uri": "true"}
        if mode == "read" and _is_archive(self.path):
            query["immutable"] = "1"
        url = URL.create("sqlite", database=f"file:{quote(str(self.path))}", query=query)
        engine = create_engine(url, json_serializer=encode_plain_json)
        pragmas = ["busy_timeout=15000", "synchronous=NORMAL"]
        if mode != "read" and _find_network_disk(self.path.parent):
            pragmas[1] = "synchronous=FULL"  # NORMAL is safe with a write-ahead log alone
        pragmas += ["foreign_keys=ON"] if mode == "write" else []
        pragmas += ["query_only=ON"] if mode == "read" else []

        @event.listens_for(engine, "connect")
        def _apply_pragmas(dbapi: Any, _record: object) -> None:
            dbapi.isolation_level = None  # the driver would begin too late; the next one begins
            for pragma in pragmas:
                dbapi.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _begin_transaction(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN" if mode == "read" else "BEGIN IMMEDIATE")

        return engine

    def prepare(self, *, create: bool) -> None:
        """Makes the file ready for writing: created, its journal chosen, at the newest revision.

        Processes that come at once take turns. An older database is copied beside itself first.

        Raises:
            Unavailable: there is no file and `create` is false, or it cannot be opened; Unwritable
                where the file system is the reason.
            SchemaError: the file belongs to a newer version, or is not a registry.
        """
        if not create:
            self._require()
        with self._hold_file_lock():
            engine = self.engine("migrate")
            try:
                self._set_journal_mode(engine)
                self._migrate(engine)
            finally:
                engine.dispose()

    def check(self, reader: Engine) -> None:
        """Sees that the file can be read by this code; raises SchemaError where it cannot."""
        self._require()
        schema.check_schema_revision(reader, self.label, REMEDY)

    def upgrade(self) -> tuple[str | None, str]:
        """Brings the file to the newest revision; returns the one it was at, and that one."""
        self._require()
        engine = self.engine("read")
        try:
            with engine.connect() as connection:
                before = schema.find_revision(connection, self.label)
        finally:
            engine.dispose()
        self.prepare(create=False)
        return before, schema.REVISIONS[-1]

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Turns the driver's errors into the registry's own."""
        try:
            yield
        except sqlite3.Error as error:  # before a connection is SQLAlchemy's
            raise _build_unavailable_error(self.path, error) from error
        except StatementError as error:
            if isinstance(error, DBAPIError) and not isinstance(error, IntegrityError):
                raise _build_unavailable_error(self.path, error.orig) from error
            raise RegistryDatabaseError(
                f"registry {self.path} refuses the record: {error.orig}"
            ) from error

    @contextmanager
    def hold_write_turn(self) -> Iterator[None]:
        """Waits until no other process writes.

        SQLite would wait as well, but looks ten times a second only: where many write all the time,
        the one that has waited longest would give up with "database is locked".

        Raises:
            Unavailable: another process has been writing for `PATIENCE` seconds.
        """
        end, pause = time.monotonic() + PATIENCE, 0.001
        with self._lock_file() as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise DatabaseUnavailableError(
                            f"registry {self.path}: others have been writing for {PATIENCE:g} s"
                        ) from None
                # Not a result of anything: waiters shall only not look all at once.
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(1.5 * pause, 0.01)
            try:
                yield
            finally:
                # Closing is not enough where another thread has forked meanwhile.
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _require(self) -> None:
        if not self.path.exists():
            raise DatabaseUnavailableError(f"there is no registry at {self.path}")

    @contextmanager
    def _hold_file_lock(self) -> Iterator[None]:
        with self._lock_file(make_folder=True) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _lock_file(self, *, make_folder: bool = False) -> TextIO:
        path = self.path
        try:
            if make_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            return path.with_name(f"{path.name}.lock").open("w")
        except OSError as error:
            if error.errno in REFUSALS:
                raise DatabaseUnwritableError(path, error.errno, str(error.strerror)) from error
            raise DatabaseUnavailableError(f"cannot write registry {path}: {error}") from error

    def _set_journal_mode(self, engine: Engine) -> None:
        # The mode cannot change inside a transaction, and every SQLAlchemy connection is one.
        network = _find_network_disk(self.path.parent)
        if network is not None:
            _warn_of_network_disk(self.path, network)
        raw = engine.raw_connection()
        try:
            raw.cursor().execute(f"PRAGMA journal_mode={'WAL' if network is None else 'DELETE'}")
        finally:
            raw.close()

    def _migrate(self, engine: Engine) -> None:
        with engine.connect() as connection:
            revision = schema.find_revision(connection, self.label)
        if revision == schema.REVISIONS[-1]:
            return
        if revision is not None:
            _back_up(engine, self.path.with_name(f"{self.path.name}-{revision}.bak"))
        with engine.begin() as connection:
            schema.upgrade_schema(connection)
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
            if broken:
                raise SchemaError(
                    f"upgrading {self.path} would break {len(broken)} references; not done"
                )


def _is_archive(path: Path) -> bool:
    """Whether nobody can write here: readers of a live log need to, those of a still file not."""
    log = path.with_name(f"{path.name}-wal")
    return not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)


def _find_network_disk(folder: Path) -> str | None:
    try:
        return file_systems.network_file_system(folder)
    except OSError:
        return None  # opening the file will say what is wrong with its folder


@cache
def _warn_of_network_disk(path: Path, network: str) -> None:
    """Says once in a process what a network disk costs."""
    logging.getLogger("rlx_registry").warning(
        "registry %s is on a network disk (%s): it works without its write-ahead log, slower, and "
        "only as safely as that disk locks files; set RLX_HOME to a local disk, or name a "
        "PostgreSQL database as the registry",
        path,
        network,
    )


def _back_up(engine: Engine, target: Path) -> None:
    target.unlink(missing_ok=True)  # left by an upgrade that did not finish
    raw = engine.raw_connection()
    try:
        raw.cursor().execute("VACUUM INTO ?", (str(target),))
    finally:
        raw.close()


def _build_unavailable_error(path: Path, error: BaseException | None) -> DatabaseUnavailableError:
    """The error for what SQLite said, with the file system's part in it told apart."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest says more than is asked here
    unopened = code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
    if code == sqlite3.SQLITE_FULL or (unopened and _count_free_bytes(path) < SMALLEST):
        return DatabaseUnwritableError(path, errno.ENOSPC, str(error))
    if code == sqlite3.SQLITE_READONLY or (unopened and not os.access(path.parent, os.W_OK)):
        return DatabaseUnwritableError(path, errno.EROFS, str(error))
    return DatabaseUnavailableError(f"registry {path}: {error}")


def _count_free_bytes(path: Path) -> int:
    """Bytes free on the disk of a database; plenty where nobody can say."""
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return SMALLEST
