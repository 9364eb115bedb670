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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError

from rlx_registry import models
from rlx_registry.column_values import decode_stored_json, encode_plain_json, set_base_folder
from rlx_registry.errors import (
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    RegistryDatabaseError,
)

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
LOG_INDEX_BYTES = 64 * 1024
"""Free bytes below which SQLite cannot keep the index of its write-ahead log."""
TURN_SECONDS = 60.0
"""Seconds that a process waits for its turn to write."""
SILENT_SECONDS = 3.0
"""Seconds after which it says what it waits for."""
BUSY_SECONDS = 15.0
"""Seconds that SQLite itself waits for another process's transaction."""
HELP = "one of them may be frozen: find it with `fuser` on that file, and wake or end it"
RUNS = "runs"
"""Folder of the runs' files beside a registry, as `rlx.home` lays it out."""
NETWORK_DISKS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "gfs2"}
    | {"ocfs2", "vboxsf", "fuse.sshfs", "fuse.glusterfs", "fuse.juicefs", "virtiofs"}
)
"""File systems that several machines may share, on which a write-ahead log is not safe."""

Mode = Literal["read", "write", "create"]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sqlite:
    """One SQLite file, given by its absolute path."""

    path: Path

    @classmethod
    def from_url(cls, url: URL) -> "Sqlite":
        """The file behind a `sqlite:///path` URL."""
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
        """Returns an engine, without opening the file; "create" is "write" that may create it."""
        query = {"mode": {"read": "ro", "write": "rw", "create": "rwc"}[mode], "uri": "true"}
        if mode == "read" and _is_archive(self.path):
            query["immutable"] = "1"
        url = URL.create("sqlite", database=f"file:{quote(str(self.path))}", query=query)
        engine = create_engine(
            url, json_serializer=encode_plain_json, json_deserializer=decode_stored_json
        )
        set_base_folder(engine, self.path.parent)
        pragmas = [f"busy_timeout={BUSY_SECONDS * 1000:.0f}"]
        if mode == "read":
            pragmas += ["query_only=ON"]
        else:  # NORMAL is safe with a write-ahead log alone
            safe = "NORMAL" if self._journal_mode == "wal" else "FULL"
            pragmas += [f"synchronous={safe}", "foreign_keys=ON"]

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
        """Creates the file and its tables, if `create` is true, and sets its journal mode; a file
        that needs neither is only read. Concurrent processes are serialized."""
        if not create:
            self._require()
        self._open_lock(make_folder=True).close()  # reports a file system that cannot be written
        if self.path.exists() and self._is_prepared():
            return
        with self.hold_write_turn():
            if not self.path.exists() and (lost := describe_lost_registry(self.path)):
                _LOG.warning("a new registry is made at %s%s", self.path, lost)
            engine = self.engine("create")
            try:
                # The mode cannot change in a transaction, which every SQLAlchemy connection opens.
                raw = engine.raw_connection()
                raw.cursor().execute(f"PRAGMA journal_mode={self._journal_mode}")
                raw.close()
                with engine.begin() as connection:
                    if not models.has_tables(connection, self.label):
                        models.create_tables(connection)
            finally:
                engine.dispose()

    def check(self, reader: Engine) -> None:
        """Raises unless the file is there and this version can read it."""
        self._require()
        with reader.connect() as connection:
            models.require_tables(connection, self.label)

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
        """
        with self._open_lock() as lock:
            try:
                wait_for_lock(lock)
            except TimeoutError:
                raise DatabaseUnavailableError(
                    f"registry {self.path}: locked by other writers for {TURN_SECONDS:g} s; {HELP}"
                ) from None
            try:
                yield
            finally:
                # Closing does not release the lock if another thread has forked meanwhile.
                fcntl.flock(lock, fcntl.LOCK_UN)

    @property
    def _journal_mode(self) -> str:
        """No write-ahead log on a network disk, which cannot share its index."""
        with suppress(OSError):  # a system may not tell
            device = self.path.parent.stat().st_dev
            number = f"{os.major(device)}:{os.minor(device)}"
            for line in Path("/proc/self/mountinfo").read_text().splitlines():
                mount, _, disk = line.partition(" - ")
                if mount.split()[2] == number:
                    return "delete" if disk.split()[0] in NETWORK_DISKS else "wal"
        return "wal"

    def _require(self) -> None:
        if not self.path.exists():
            raise DatabaseUnavailableError(
                f"there is no registry at {self.path}{describe_lost_registry(self.path)}"
            )

    def _is_prepared(self) -> bool:
        engine = self.engine("read")
        try:
            with engine.connect() as connection:
                mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
                return models.has_tables(connection, self.label) and mode == self._journal_mode
        finally:
            engine.dispose()

    def _open_lock(self, *, make_folder: bool = False) -> TextIO:
        path = self.path
        try:
            if make_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            return path.with_name(f"{path.name}.lock").open("w")
        except OSError as error:
            if error.errno in REFUSALS:
                raise DatabaseUnwritableError(path, error.errno, str(error.strerror)) from error
            raise DatabaseUnavailableError(f"cannot write registry {path}: {error}") from error


def wait_for_lock(file: TextIO) -> None:
    """Locks a file that other processes may have locked; after a while, logs what is waited for.
    TimeoutError if others have held it for `TURN_SECONDS`."""
    begin, pause, is_silent = time.monotonic(), 0.001, True
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - begin
        if waited > TURN_SECONDS:
            raise TimeoutError
        if is_silent and waited > SILENT_SECONDS:
            is_silent = False
            _LOG.warning("waiting for other processes to release %s; %s", file.name, HELP)
        # Unseeded randomness: it only keeps waiters from polling in lockstep.
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(1.5 * pause, 0.01)


def describe_lost_registry(path: Path) -> str:
    """What to do about a missing file beside the folders of its runs; "" if there are none."""
    with suppress(OSError):
        if count := sum(1 for one in (path.parent / RUNS).glob("[!.]*") if one.is_dir()):
            return (
                f", and the {count} run folders in {path.parent / RUNS} are no copy of it: put "
                f"back a backup of {path.name}, as `sqlite3 {path.name} '.backup FILE'` makes it; "
                "without one, a run's trained model and files can be used, but not its records"
            )
    return ""


def _is_archive(path: Path) -> bool:
    """Whether the file can be read as is: its folder is read-only, where readers of a live
    write-ahead log could not write, and it has no log."""
    log = path.with_name(f"{path.name}-wal")
    return not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)


def _build_unavailable_error(path: Path, error: BaseException | None) -> DatabaseUnavailableError:
    """The registry's error for an SQLite error; distinguishes failures of the file system."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary result code
    unopened = code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
    if code == sqlite3.SQLITE_FULL or (unopened and _count_free_bytes(path) < LOG_INDEX_BYTES):
        return DatabaseUnwritableError(path, errno.ENOSPC, str(error))
    if code == sqlite3.SQLITE_READONLY or (unopened and not os.access(path.parent, os.W_OK)):
        return DatabaseUnwritableError(path, errno.EROFS, str(error))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DatabaseUnavailableError(
            f"registry {path}: others have held it for {BUSY_SECONDS:g} s; {HELP}"
        )
    return DatabaseUnavailableError(f"registry {path}: {error}")


def _count_free_bytes(path: Path) -> int:
    """Free bytes on a database's disk; enough, if they cannot be determined."""
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return LOG_INDEX_BYTES
