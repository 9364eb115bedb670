"""Create MLflow's SQLite store so that a kill at any moment leaves either a whole one or none.

MLflow creates a store by many migrations that are not one transaction, and it cannot go on with a
store whose creation was interrupted. rlx therefore lets MLflow create it under another name and
renames it. One process does this at a time; what a killed one left behind is deleted by the next.

MLflow also stores absolute locations of artifacts. rlx updates them when the store has been moved
or copied together with its artifacts.
"""

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from rlx.record.mlflow_client import MirrorUnavailableError, create_sqlite_store

__all__ = ["ensure_store", "hold_file_lock", "locate_store_lock"]

ARTIFACTS = "mlartifacts"
"""Folder of the artifacts, beside the store."""
WAIT = 30.0
"""Seconds to wait for another process's transaction."""
LOCATIONS = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
}
"""Tables of MLflow that store where artifacts are, and the columns."""


def locate_store_lock(uri: str) -> Path | None:
    """The lock file of an SQLite store, next to the store; None for any other tracking URI."""
    path = _locate_sqlite_store(uri)
    return None if path is None else path.with_name(f"{path.name}.lock")


def ensure_store(uri: str) -> str | None:
    """Creates the SQLite store of a tracking URI if it does not exist, or is incomplete.

    In a store that has been moved or copied, the locations of artifacts are updated. Does nothing
    for other tracking URIs.

    Returns:
        What was done with an incomplete store; None if there was none.

    Raises:
        MirrorUnavailableError: the store cannot be created.
    """
    path, lock = _locate_sqlite_store(uri), locate_store_lock(uri)
    if path is None or lock is None:
        return None
    with hold_file_lock(lock):
        path = path.resolve()
        incomplete = path.exists() and _is_incomplete(path)
        if path.exists() and not incomplete:
            _relocate_artifacts(path)
            return None
        try:
            return _create_store(path, incomplete)
        except OSError as error:
            raise MirrorUnavailableError(
                f"MLflow's store {path} cannot be created: {error.strerror}"
            ) from error


def _locate_sqlite_store(uri: str) -> Path | None:
    scheme, _, path = uri.partition(":///")
    return Path(path.partition("?")[0]) if scheme == "sqlite" else None


def _create_store(path: Path, incomplete: bool) -> str | None:
    """Creates a store under a temporary name and renames it; an incomplete one is kept aside."""
    temporary = path.with_name(f"{path.name}.making")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    _delete_journals(temporary)
    create_sqlite_store(temporary)
    kept = path.with_name(f"{path.name}.half-made")
    if incomplete:
        path.replace(kept)
    _delete_journals(path)  # SQLite would apply them to the new file
    temporary.replace(path)
    if not incomplete:
        return None
    return (
        f"MLflow's store {path} was left incomplete by a killed process, without any run: it has "
        f"been replaced (the old file is {kept.name}); `rlx check --repair` sends it all runs"
    )


def _relocate_artifacts(path: Path) -> None:
    """Updates locations below an `mlartifacts` folder elsewhere that the store has beside itself.

    Raises:
        MirrorUnavailableError: the store cannot be written.
    """
    root = path.with_name(ARTIFACTS)
    try:
        with closing(sqlite3.connect(path, timeout=WAIT)) as store, store:
            tables = {name for (name,) in store.execute("SELECT name FROM sqlite_master")}
            for table, column in LOCATIONS.items():
                if table not in tables:
                    continue
                rows = store.execute(f"SELECT DISTINCT {column} FROM {table}").fetchall()
                for (old,) in rows:
                    if new := _find_new_location(old, root):
                        store.execute(
                            f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (new, old)
                        )
    except sqlite3.OperationalError as error:  # locked, or not writable
        raise MirrorUnavailableError(
            f"MLflow's store {path} has been moved, and the locations of its artifacts cannot be "
            f"updated: {error}"
        ) from error
    except sqlite3.DatabaseError:
        return  # no database: MLflow reports why


def _find_new_location(location: str | None, root: Path) -> str | None:
    """Where artifacts are that MLflow looks for at `location`; None if they are there."""
    parts = urlsplit(location or "")
    if parts.scheme not in ("file", ""):
        return None
    old = Path(unquote(parts.path) if parts.scheme else parts.path)
    if old.is_relative_to(root) or ARTIFACTS not in old.parts:
        return None
    index = len(old.parts) - 1 - old.parts[::-1].index(ARTIFACTS)
    new = root.joinpath(*old.parts[index + 1 :])
    experiment = root.joinpath(*old.parts[index + 1 : index + 2])
    if old.exists() and not experiment.is_dir():
        return None
    return new.as_uri() if parts.scheme else str(new)


def _delete_journals(path: Path) -> None:
    for suffix in ("-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _is_incomplete(path: Path) -> bool:
    """Whether the creation of a store was interrupted.

    MLflow's first table is `experiments`, and the last thing that it writes is the first
    experiment. A store without any experiment contains no run.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True)) as store:
            tables = {name for (name,) in store.execute("SELECT name FROM sqlite_master")}
            if "experiments" not in tables:
                return not tables  # else it is no store of MLflow
            return store.execute("SELECT 1 FROM experiments LIMIT 1").fetchone() is None
    except sqlite3.Error:  # not SQLite, or locked by a program that uses it: MLflow reports why
        return False


@contextmanager
def hold_file_lock(lock: Path) -> Iterator[None]:
    """Holds a lock file exclusively; the lock of a killed process is free.

    Raises:
        MirrorUnavailableError: the file cannot be created.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise MirrorUnavailableError(
            f"cannot lock {lock} to update MLflow: {error.strerror}"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
