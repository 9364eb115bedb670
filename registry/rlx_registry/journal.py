"""A run's journal: its changes, one JSON line each, in a file of the run's own folder.

The registry is the truth, and the journal what it can be made from again. A journal that is there
is whole; one that could not be written, on a full disk for instance, is put aside, and written
anew from the registry by whoever next writes the run. A run never fails for its journal.
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
"""What a journal is called from when it could not be written until one is written anew."""
OTHERS = "journal.other.jsonl"
"""What the journal of another run is called that was found in a run's new folder."""
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
PAUSE = 60.0
"""Seconds after which a journal that could not be written is tried again: it may be long."""

Snapshot = Callable[[], Iterable[RunChange]]


class JournalWriter:
    """Writes the journals of the runs of one registry; any number of processes may at once."""

    def __init__(self) -> None:
        self._later: dict[Path, float] = {}

    def add(self, folder: Path, changes: Sequence[RunChange], snapshot: Snapshot) -> None:
        """Appends changes that the registry holds already.

        Args:
            snapshot: tells the run from its submission on, these changes included; asked where the
                journal has to be written anew.
        """
        path = folder / NAME
        if time.monotonic() < self._later.get(path, 0.0):
            return
        text = b"".join(map(format_journal_line, changes))
        try:
            if path in self._later:
                _put_aside(path)  # it was away with its folder, and lacks what was written then
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
                "%s cannot be written: %s; the run goes on, and the registry knows everything",
                path,
                getattr(error, "strerror", error),
            )
        self._later[path] = time.monotonic() + PAUSE
        with suppress(OSError):
            _put_aside(path)


def format_journal_line(change: RunChange) -> bytes:
    """A change as it stands in a journal."""
    shown = {"change": change.kind, "at": change.at, "with": change.fields}
    return encode_plain_json(shown).encode() + b"\n"


def _put_aside(path: Path) -> None:
    """Marks a journal, where there is one, as not whole."""
    with suppress(FileNotFoundError):
        path.replace(path.with_name(UNFINISHED))


def _put_others_aside(path: Path, snapshot: Iterable[RunChange]) -> None:
    """Makes room where the folder of a run holds the journal of another."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        if file.readline() != format_journal_line(next(iter(snapshot))):
            path.replace(path.with_name(OTHERS))


def _append_lines(path: Path, text: bytes) -> bool:
    """Appends whole lines at once; False where there is no journal, or one that was cut short."""
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
    """Writes a journal anew; False where another process has done so meanwhile.

    Whoever writes the run after the snapshot was taken finds either no journal, and takes one of
    his own, or this one, and appends to it: nothing is lost between the two.
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
