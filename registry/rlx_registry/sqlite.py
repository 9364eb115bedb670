"""A registry in one SQLite file.

With the driver's defaults, two processes can claim the same row, and a transaction that begins by
reading may fail to upgrade to a writer however long it waits. Writers therefore use BEGIN IMMEDIATE
with a write-ahead log, and readers use a separate read-only engine, which never blocks a writer.
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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TextIO
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError

from rlx_registry import file_systems, schema
from rlx_registry.column_values import decode_stored_json, encode_plain_json, set_base_folder
from rlx_registry.errors import (
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    RegistryDatabaseError,
    SchemaError,
)

__all__ = ["Sqlite"]

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
SMALLEST = 64 * 1024
"""Free bytes below which SQLite cannot keep the index of its write-ahead log."""
PATIENCE = 60.0
"""Seconds that a process waits for others, to write the file or to prepare it."""
BUSY = 15.0
"""Seconds that SQLite itself waits for another process's transaction."""
HELP = "one of them may be frozen: find it with `fuser` on that file, and wake or end it"
REMEDY = "opening it once for writing upgrades it"

Mode = Literal["read", "write", "migrate"]


@dataclass(frozen=True, slots=True)
class Sqlite:
    """One SQLite file, given by its absolute path."""

    path: Path

    @classmethod
    def from_url(cls, url: URL) -> "Sqlite":
        """The file behind a `sqlite:///path` URL.

        Raises:
            DatabaseUnavailableError: the URL names no file.
        """
        if url.database in (None, "", ":memory:") or url.query:
            raise DatabaseUnavailableError(
                f"'{url}' names no file; write sqlite:///path/to/registry.db"
            )
        return cls(Path(str(url.database)).absolute())

    @property
    def label(self) -> str:
        """The database's name in messages: its path."""
        return str(self.path)

    def engine(self, mode: Mode) -> Engine:
        """Returns an engine for reading, writing or migrating, without opening the file.

        "migrate" is "write" without foreign keys, which SQLite must not check while migrations
        rebuild tables, and may create the file.
        """
        query = {"mode": {"read": "ro", "write": "rw", "migrate": "rwc"}[mode], "uri": "true"}
        if mode == "read" and _is_archive(self.path):
            query["immutable"] = "1"
        url = URL.create("sqlite", database=f"file:{quote(str(self.path))}", query=query)
        engine = create_engine(
            url, json_serializer=encode_plain_json, json_deserializer=decode_stored_json
        )
        set_base_folder(engine, self.path.parent)
        pragmas = [f"busy_timeout={BUSY * 1000:.0f}", "synchronous=NORMAL"]
        if mode != "read" and _find_network_disk(self.path.parent):
            pragmas[1] = "synchronous=FULL"  # NORMAL is safe with a write-ahead log alone
        pragmas += ["foreign_keys=ON"] if mode == "write" else []
        pragmas += ["query_only=ON"] if mode == "read" else []

        @event.listens_for(engine, "connect")
        def _apply_pragmas(dbapi: Any, _record: object) -> None:
            dbapi.isolation_level = None  # the driver would begin too late; see the listener below
            for pragma in pragmas:
                dbapi.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _begin_transaction(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN" if mode == "read" else "BEGIN IMMEDIATE")

        return engine

    def prepare(self, *, create: bool) -> None:
        """Prepares the file for writing: creates it, sets its journal mode, and upgrades it.

        A file that needs none of this is only read. Concurrent processes are serialized. A new file
        is made aside and renamed. An older database is first backed up beside itself.

        Raises:
            DatabaseUnavailableError: there is no file and `create` is false, or it cannot be
                opened or is locked; DatabaseUnwritableError if the file system is the reason.
            SchemaError: a newer version wrote the file, or it is not a registry.
        """
        if not create:
            self._require()
        self._lock_file(make_folder=True).close()  # reports a file system that cannot be written
        network = _find_network_disk(self.path.parent)
        if network is not None:
            _warn_of_network_disk(self.path, network)
        if self._is_prepared():
            return
        with self.hold_write_turn():
            if self.path.exists():
                self._bring_up_to_date()
            else:
                self._create()

    def check(self, reader: Engine) -> None:
        """Checks the file's revision.

        Raises:
            DatabaseUnavailableError: there is no file.
            SchemaError: this version cannot read it.
        """
        self._require()
        schema.check_schema_revision(reader, self.label, REMEDY)

    def upgrade(self) -> tuple[str | None, str]:
        """Upgrades the file; returns the previous and the newest revision."""
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
        """Translates the driver's errors into the registry's."""
        try:
            yield
        except sqlite3.Error as error:  # raised before SQLAlchemy manages the connection
            raise _build_unavailable_error(self.path, error) from error
        except StatementError as error:
            if isinstance(error, DBAPIError) and not isinstance(error, IntegrityError):
                raise _build_unavailable_error(self.path, error.orig) from error
            raise RegistryDatabaseError(
                f"registry {self.path} rejected the record: {error.orig}"
            ) from error

    @contextmanager
    def hold_write_turn(self) -> Iterator[None]:
        """Waits until no other process writes, and holds the lock during the block.

        SQLite itself polls only ten times a second. With many busy writers, the one that has waited
        longest would give up with "database is locked".

        Raises:
            DatabaseUnavailableError: other processes have been writing for `PATIENCE` seconds.
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
                            f"registry {self.path}: locked by other writers for {PATIENCE:g} s; "
                            + HELP
                        ) from None
                # Unseeded randomness: it only keeps waiters from polling in lockstep.
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(1.5 * pause, 0.01)
            try:
                yield
            finally:
                # Closing does not release the lock if another thread has forked meanwhile.
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _require(self) -> None:
        if not self.path.exists():
            raise DatabaseUnavailableError(f"there is no registry at {self.path}")

    def _is_prepared(self) -> bool:
        """Whether the file has the newest revision and the right journal mode."""
        if not self.path.exists():
            return False
        engine = self.engine("read")
        try:
            with engine.connect() as connection:
                mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
                revision = schema.find_revision(connection, self.label)
        finally:
            engine.dispose()
        return revision == schema.REVISIONS[-1] and mode == self._choose_journal_mode()

    def _create(self) -> None:
        """Makes the file aside and renames it: whoever is killed meanwhile leaves no part of it."""
        aside = replace(self, path=self.path.with_name(f"{self.path.name}.new"))
        for end in ("", "-wal", "-shm", "-journal"):  # left by one who was
            aside.path.with_name(aside.path.name + end).unlink(missing_ok=True)
        aside._bring_up_to_date()
        aside.path.rename(self.path)

    def _bring_up_to_date(self) -> None:
        engine = self.engine("migrate")
        try:
            self._set_journal_mode(engine)
            self._migrate(engine)
        finally:
            engine.dispose()

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

    def _choose_journal_mode(self) -> str:
        """No write-ahead log on a network disk, which cannot share its index."""
        return "wal" if _find_network_disk(self.path.parent) is None else "delete"

    def _set_journal_mode(self, engine: Engine) -> None:
        # The mode cannot change in a transaction, which every SQLAlchemy connection opens.
        raw = engine.raw_connection()
        try:
            raw.cursor().execute(f"PRAGMA journal_mode={self._choose_journal_mode()}")
        finally:
            raw.close()

    def _migrate(self, engine: Engine) -> None:
        with engine.connect() as connection:
            revision = schema.find_revision(connection, self.label)
        if revision == schema.REVISIONS[-1]:
            return
        if revision is None:
            with engine.begin() as connection:
                schema.create_schema(connection)
            return
        _back_up(engine, self.path.with_name(f"{self.path.name}-{revision}.bak"))
        with engine.begin() as connection:
            schema.upgrade_schema(connection)
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
            if broken:
                raise SchemaError(
                    f"upgrading {self.path} would break {len(broken)} references; nothing was "
                    "changed"
                )


def _is_archive(path: Path) -> bool:
    """Whether the file is in a read-only folder and has no log, so that it can be read as is.

    Readers of a live write-ahead log need write access to its folder.
    """
    log = path.with_name(f"{path.name}-wal")
    return not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)


def _find_network_disk(folder: Path) -> str | None:
    try:
        return file_systems.network_file_system(folder)
    except OSError:
        return None  # opening the file reports what is wrong with its folder


@cache
def _warn_of_network_disk(path: Path, network: str) -> None:
    """Logs a warning about a network disk, once per process."""
    logging.getLogger("rlx_registry").warning(
        "registry %s is on a network disk (%s): it runs without a write-ahead log, which is "
        "slower, and is only as safe as that disk's file locks; set RLX_HOME to a local disk, or "
        "use a PostgreSQL database as the registry",
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
    """The registry's error for an SQLite error; distinguishes failures of the file system."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary result code
    unopened = code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
    if code == sqlite3.SQLITE_FULL or (unopened and _count_free_bytes(path) < SMALLEST):
        return DatabaseUnwritableError(path, errno.ENOSPC, str(error))
    if code == sqlite3.SQLITE_READONLY or (unopened and not os.access(path.parent, os.W_OK)):
        return DatabaseUnwritableError(path, errno.EROFS, str(error))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DatabaseUnavailableError(
            f"registry {path}: others have held it for {BUSY:g} s; {HELP}"
        )
    return DatabaseUnavailableError(f"registry {path}: {error}")


def _count_free_bytes(path: Path) -> int:
    """Free bytes on a database's disk; enough, if they cannot be determined."""
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return SMALLEST
