"""Temporary folders and semaphores of ranks, which a killed process cannot remove itself.

The ranks that a process starts share a temporary folder. Its name is a mark of the run and the id
of that process, and the names of their semaphores and folders in shared memory contain it, too. The
process removes all of these when its ranks have ended, and those of earlier processes of the run
before it starts any. Another one may still be at work here: that of an attempt which lost its
connection, or of another node on the same machine.
"""

import hashlib
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlx.home import RunFolder
from rlx.launch.processes import has_ended

__all__ = ["name_semaphores", "open_temporary_folder", "remove_temporary_folder"]

_SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"rlx-[0-9a-f]{10}-\d+-\w{8}")
"""Names of temporary folders."""


@contextmanager
def open_temporary_folder(run: RunFolder) -> Iterator[dict[str, str]]:
    """Makes a temporary folder for the ranks of an attempt, and sweeps up after them.

    It is no folder of the run's, because sockets need short paths and local disks are faster.

    Yields:
        The environment variables that make the ranks use it.
    """
    _remove_abandoned(run)
    folder = Path(tempfile.mkdtemp(prefix=f"{_build_mark(run)}{os.getpid()}-"))
    try:
        yield {"TMPDIR": str(folder)}
    finally:
        _remove_leftovers(folder.name)
        _remove_abandoned(run)  # of peers on this machine that were killed meanwhile


def name_semaphores() -> None:
    """Names the semaphores of this process, and of those that it starts, like its folder."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{Path(tempfile.gettempdir()).name}"


def remove_temporary_folder() -> None:
    """Removes the temporary folder of this rank, whose supervisor is no longer there to do so."""
    folder = Path(tempfile.gettempdir())
    if _NAME.fullmatch(folder.name):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(run: RunFolder) -> None:
    for name in _find_names(run):
        if has_ended(int(name.split("-")[2])):
            _remove_leftovers(name)


def _find_names(run: RunFolder) -> set[str]:
    """Names of the temporary folders of the run of which this machine still has something."""
    name = re.compile(rf"{_build_mark(run)}\d+-\w{{8}}")
    return {
        found[0] for path in _find_leftovers(_build_mark(run)) if (found := name.search(path.name))
    }


def _find_leftovers(name: str) -> Iterator[Path]:
    """Files and folders whose names contain `name`."""
    for place in (Path(tempfile.gettempdir()), _SHARED_MEMORY):
        yield from place.glob(f"*{name}*")


def _remove_leftovers(name: str) -> None:
    """Removes a temporary folder and what is named by it, of processes that have ended."""
    for path in _find_leftovers(name):
        with suppress(OSError):  # another user's, or gone
            if path.lstat().st_uid != os.getuid():
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _build_mark(run: RunFolder) -> str:
    return f"rlx-{hashlib.sha256(os.fsencode(run.root)).hexdigest()[:10]}-"
