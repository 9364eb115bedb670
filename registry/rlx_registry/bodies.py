"""Bodies: the bulky part of a step's rollouts, one Parquet file each, known by its digest."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlx_registry.errors import BodyError

if TYPE_CHECKING:
    import pyarrow

__all__ = ["read_body", "sync", "write_body"]


def write_body(path: Path | str, table: "pyarrow.Table") -> tuple[str, int]:
    """Writes a table as Parquet with zstd; the file appears whole or not at all.

    Returns:
        The file's SHA-256 (hex) and its size in bytes, for `Registry.add_rollouts`.
    """
    from pyarrow import parquet

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w+b") as file:
            parquet.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)  # a rename survives a power cut only when its folder has been written
    return digest, size


def read_body(path: Path | str, sha256: str | None = None) -> "pyarrow.Table":
    """Reads a table back.

    Args:
        sha256: the digest that was recorded; None skips the comparison.

    Raises:
        BodyError: the file is missing, is not the one recorded, or is not Parquet.
    """
    import pyarrow
    from pyarrow import parquet

    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BodyError(f"cannot read body {path.name}: {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise BodyError(f"body {path.name} was recorded as {sha256[:12]}… but is {found[:12]}…")
    try:
        return parquet.read_table(pyarrow.BufferReader(content))
    except pyarrow.ArrowException as error:
        raise BodyError(f"body {path.name} is damaged: {error}") from error


def sync(path: Path) -> None:
    """Has a file, or the names in a folder, written to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
