"""Temporary folders and semaphores of ranks, which a killed process cannot remove itself.

The ranks of an attempt share a temporary folder. Its name begins with a mark of the run, which the
names of their semaphores and folders in shared memory contain, too. Whoever starts ranks of the run
on this machine removes all of these, before and after.
"""

import hashlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlx.home import RunFolder

__all__ = ["name_semaphores", "open_temporary_folder", "remove_temporary_folder"]

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def open_temporary_folder(run: RunFolder) -> Iterator[dict[str, str]]:
    """Makes a temporary folder for the ranks of an attempt, and sweeps up after them.

    It is no folder of the run's, because sockets need short paths and local disks are faster.

    Yields:
        The environment variables that make the ranks use it.
    """
    _sweep_leftovers(run)
    try:
        yield {"TMPDIR": tempfile.mkdtemp(prefix=_build_mark(run))}
    finally:
        _sweep_leftovers(run)


def name_semaphores() -> None:
    """Names the semaphores of this process, and of those that it starts, like its folder."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{Path(tempfile.gettempdir()).name}"


def remove_temporary_folder(run: RunFolder) -> None:
    """Removes the temporary folder of this rank, whose supervisor is no longer there to do so."""
    folder = Path(tempfile.gettempdir())
    if folder.name.startswith(_build_mark(run)):
        shutil.rmtree(folder, ignore_errors=True)


def _sweep_leftovers(run: RunFolder) -> None:
    """Removes what this machine still has of the run's ranks, which have ended."""
    mark, mine = _build_mark(run), os.getuid()
    places = (Path(tempfile.gettempdir()), _SHARED_MEMORY)
    for path in (found for place in places for found in place.glob(f"*{mark}*")):
        with suppress(OSError):  # another user's, or gone
            if path.lstat().st_uid != mine:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _build_mark(run: RunFolder) -> str:
    return f"rlx-{hashlib.sha256(os.fsencode(run.root)).hexdigest()[:10]}-"
