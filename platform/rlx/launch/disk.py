"""Room on the disk: how much there is, and a reserve that lets a run record that there is none."""

import os
import shutil
from pathlib import Path

__all__ = ["LITTLE", "RESERVE", "format_disk_space", "free_bytes", "hold_reserve"]

RESERVE = 2 * 1024**2
"""Bytes that a run holds back: far more than its last records take."""
LITTLE = 200 * 1024**2
"""Bytes below which rlx warns."""


def free_bytes(path: Path) -> int:
    """Bytes free where `path` is, or where it would be made."""
    path = path.absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(there).free


def format_disk_space(count: int) -> str:
    """A number of bytes as people read it."""
    amount = count / 1024**2
    return f"{amount / 1024:.0f} GB" if amount >= 10 * 1024 else f"{amount:.0f} MB"


def hold_reserve(path: Path) -> None:
    """Takes `RESERVE` bytes of the disk; deleting the file gives them back.

    Raises:
        OSError: they are not there.
    """
    with path.open("wb") as file:
        file.write(os.urandom(RESERVE))  # some file systems store zeros in no space at all
        os.fsync(file.fileno())
