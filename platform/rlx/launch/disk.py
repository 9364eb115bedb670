"""Free disk space, and a reserve that lets a run record that the disk is full."""

import os
import shutil
from pathlib import Path

__all__ = ["LITTLE", "RESERVE", "format_disk_space", "free_bytes", "hold_reserve"]

RESERVE = 2 * 1024**2
"""Bytes that a run reserves on disk: far more than its final records need."""
LITTLE = 200 * 1024**2
"""rlx warns if fewer bytes than this are free."""


def free_bytes(path: Path) -> int:
    """Free bytes on the file system of `path`, which need not exist yet."""
    path = path.absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(there).free


def format_disk_space(count: int) -> str:
    """Formats a number of bytes in MB or GB."""
    amount = count / 1024**2
    return f"{amount / 1024:.0f} GB" if amount >= 10 * 1024 else f"{amount:.0f} MB"


def hold_reserve(path: Path) -> None:
    """Writes a file of `RESERVE` bytes; deleting it frees the space.

    Raises:
        OSError: the disk has too little space, or the file cannot be written.
    """
    with path.open("wb") as file:
        file.write(os.urandom(RESERVE))  # some file systems store zeros without using space
        os.fsync(file.fileno())
