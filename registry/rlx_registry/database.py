"""Transactions over the registry, and the way from "r-0042" to a row."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, func, select

from rlx_registry import engine, models
from rlx_registry.errors import Ambiguous, NotFound, Unavailable

__all__ = ["Database", "run_name"]

RUN_REFERENCE = re.compile(r"(?:r-)?([0-9]{1,15})")


def run_name(key: int) -> str:
    """Returns the outward id of a run: 42 is "r-0042"."""
    return f"r-{key:04d}"


class Database:
    """An open registry file: `_reading()` and `_writing()` are its transactions.

    Connections may be shared by threads, not by processes: open it after forking.
    """

    def __init__(self, url: str, *, create: bool, read_only: bool) -> None:
        self.url = url
        self._path = engine.database_path(url)
        self._writer = None
        if not read_only:
            engine.prepare(self._path, create=create)
            self._writer = engine.connect(self._path, "write")
        elif not self._path.exists():
            raise Unavailable(f"there is no registry at {self._path}")
        self._reader = engine.connect(self._path, "read")
        engine.check(self._reader, self._path)

    def close(self) -> None:
        """Closes every connection."""
        self._reader.dispose()
        if self._writer is not None:
            self._writer.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with engine.translated(self._path), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self._writer is None:
            raise Unavailable(f"registry {self._path} is open for reading only")
        with engine.translated(self._path), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def _reading_run(self, run_id: str) -> Iterator[tuple[Connection, int]]:
        with self._reading() as connection:
            yield connection, existing_key(connection, run_id)

    @contextmanager
    def _writing_run(self, run_id: str) -> Iterator[tuple[Connection, int]]:
        with self._writing() as connection:
            yield connection, existing_key(connection, run_id)


def existing_key(connection: Connection, run_id: str) -> int:
    """Returns the integer behind an id such as "r-0042", "r-42" or "42".

    Raises:
        NotFound: there is no such run; the message names the nearest.
    """
    if match := RUN_REFERENCE.fullmatch(run_id):
        key = int(match[1])
        if connection.scalar(select(models.run.c.id).where(models.run.c.id == key)) is not None:
            return key
    raise _missing(connection, run_id)


def find_key(connection: Connection, ref: str) -> int:
    """Returns the integer behind an id, "latest", or a name that only one run has.

    Raises:
        NotFound: nothing answers to it.
        Ambiguous: several runs have that name.
    """
    if RUN_REFERENCE.fullmatch(ref):
        return existing_key(connection, ref)
    table = models.run
    if ref == "latest":
        newest = connection.scalar(select(func.max(table.c.id)))
        if newest is None:
            raise _missing(connection, ref)
        return int(newest)
    keys = connection.scalars(
        select(table.c.id).where(table.c.name == ref).order_by(table.c.id.desc()).limit(4)
    ).all()
    if not keys:
        raise _missing(connection, ref)
    if len(keys) > 1:
        names = ", ".join(run_name(key) for key in keys[:3]) + ("…" if len(keys) > 3 else "")
        raise Ambiguous(f"several runs are named {ref!r}: {names}")
    return int(keys[0])


def _missing(connection: Connection, ref: str) -> NotFound:
    match = RUN_REFERENCE.fullmatch(ref)
    identity = models.run.c.id
    order = func.abs(identity - int(match[1])) if match else identity.desc()
    nearest = connection.scalars(select(identity).order_by(order, identity.desc()).limit(3)).all()
    if not nearest:
        return NotFound(f"no run {ref!r}: the registry holds none yet")
    return NotFound(f"no run {ref!r}; nearest: {', '.join(map(run_name, nearest))}")
