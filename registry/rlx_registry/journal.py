"""The journal of a run: a file in the run's folder with one JSON line per change.

The registry is authoritative; journals allow it to be restored. A journal under its normal name is
complete. If writing one fails, for instance on a full disk, it is renamed, and the next write to
the run rewrites it from the registry. A run never fails because of its journal.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import get_ident

from rlx_registry.changes import RunChange
from rlx_registry.column_values import encode_plain_json
from rlx_registry.errors import RegistryDatabaseError

__all__ = ["NAME", "OTHERS", "UNFINISHED", "JournalWriter"]

NAME = "journal.jsonl"
UNFINISHED = "journal.unfinished.jsonl"
"""Name of an incomplete journal until a complete one has been rewritten."""
OTHERS = "journal.other.jsonl"
"""Name given to another run's journal that was found in a run's new folder."""
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
PAUSE = 60.0
"""Seconds before retrying a journal that could not be written; rewriting a long one is slow."""

Snapshot = Callable[[], Iterable[RunChange]]


class JournalWriter:
    """Writes the journals of one registry's runs; any number of processes may do so at once."""

    def __init__(self) -> None:
        self._later: dict[Path, float] = {}

    def add(self, folder: Path, changes: Sequence[RunChange], snapshot: Snapshot) -> None:
        """Appends changes that are already in the registry.

        Args:
            snapshot: returns all changes of the run since its submission, including these; called
                only if the journal has to be rewritten.
        """
        path = folder / NAME
        if time.monotonic() < self._later.get(path, 0.0):
            return
        text = b"".join(map(format_journal_line, changes))
        try:
            if path in self._later:
                _put_aside(path)  # it lacks the changes made since the failed write
            if any("directory" in change.fields for change in changes if change.kind == "set"):
                _put_others_aside(path, snapshot())
            if not _append_lines(path, text) and not _write_journal(path, snapshot()):
                _append_lines(path, text)
        except (OSError, RegistryDatabaseError) as error:
            self._give_up(path, error)
        else:
            self._later.pop(path, None)

    def _give_up(self, path: Path, error: Exception) -> None:
        if path not in self._later:
            logging.getLogger("rlx_registry").warning(
                "%s cannot be written: %s; the run continues, and the registry is complete",
                path,
                getattr(error, "strerror", error),
            )
        self._later[path] = time.monotonic() + PAUSE
        with suppress(OSError):
            _put_aside(path)


def format_journal_line(change: RunChange) -> bytes:
    """A change as a line of a journal."""
    entry = {"change": change.kind, "at": change.at, "with": change.fields}
    return encode_plain_json(entry).encode() + b"\n"


def _put_aside(path: Path) -> None:
    """Renames a journal, if there is one, to mark it incomplete."""
    with suppress(FileNotFoundError):
        path.replace(path.with_name(UNFINISHED))


def _put_others_aside(path: Path, snapshot: Iterable[RunChange]) -> None:
    """Renames the journal in a run's folder if it belongs to another run."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        if file.readline() != format_journal_line(next(iter(snapshot))):
            path.replace(path.with_name(OTHERS))


def _append_lines(path: Path, text: bytes) -> bool:
    """Appends lines with one write; False if the journal is missing or truncated."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        end = os.lseek(file, 0, os.SEEK_END)
        if end == 0 or os.pread(file, 1, end - 1) != b"\n":
            if os.path.samestat(os.fstat(file), path.stat()):
                _put_aside(path)
            return False
        if os.write(file, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)
    return True


def _write_journal(path: Path, changes: Iterable[RunChange]) -> bool:
    """Rewrites a journal; False if another process has done so meanwhile.

    A process that writes the run after the snapshot was taken either finds no journal and takes a
    snapshot of its own, or finds this journal and appends to it. No change is lost in between.
    """
    aside = path.with_name(f".{NAME}.{os.getpid()}.{get_ident()}")
    try:
        with aside.open("wb") as file:
            file.writelines(map(format_journal_line, changes))
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    path.with_name(UNFINISHED).unlink(missing_ok=True)
    return True
