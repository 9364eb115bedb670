"""Bodies: the bulky part of a step's rollouts, one Parquet file each, known by its digest."""

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_registry.errors import BodyError

if TYPE_CHECKING:
    import pyarrow

__all__ = ["read_body", "read_trees", "search_body_trees", "sync_to_disk", "write_body"]

GROUP = 2**21
"""Bytes of a table that are kept together: what a reader of one tree decodes."""


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
            parquet.write_table(table, file, **_build_parquet_options(table))
            file.flush()
            os.fsync(file.fileno())
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_to_disk(path.parent)  # a rename survives a power cut only when its folder has been written
    return digest, size


def _build_parquet_options(table: "pyarrow.Table") -> dict[str, Any]:
    """Groups of few records, as pages ask for few; figures of tokens repeat too seldom for a
    dictionary, which costs more time and space than it saves."""
    records = max(1, table.num_rows * GROUP // max(1, table.nbytes))
    return {"compression": "zstd", "use_dictionary": False, "row_group_size": records}


def read_body(path: Path | str, sha256: str | None = None) -> "pyarrow.Table":
    """Reads a table back.

    Args:
        sha256: the digest that was recorded; None skips the comparison.

    Raises:
        BodyError: the file is missing, is not the one recorded, or is not Parquet.
    """
    from pyarrow import parquet

    with _open_body(Path(path), sha256) as source:
        return parquet.read_table(source)


def read_trees(
    path: Path | str, sha256: str | None, trees: Collection[int]
) -> list[dict[str, Any]]:
    """Reads the records of some trees of a step's rollouts.

    Raises:
        BodyError: as `read_body`; or the body is not one of rollouts.
    """
    from pyarrow import parquet

    with _open_body(Path(path), sha256) as source:
        table = parquet.read_table(source, filters=[("tree", "in", list(trees))])
        found: list[dict[str, Any]] = table.to_pylist()
        return found


def search_body_trees(path: Path | str, sha256: str | None, text: str) -> set[int]:
    """Returns the trees of a step in which a text is said below the prompt; in either case.

    Raises:
        BodyError: as `read_trees`.
    """
    from pyarrow import parquet

    wanted = text.casefold()
    with _open_body(Path(path), sha256) as source:
        file = parquet.ParquetFile(source)
        return {
            record["tree"]
            for record in file.read(columns=["tree", "segments.list.element.text"]).to_pylist()
            if any(wanted in (said["text"] or "").casefold() for said in record["segments"][1:])
        }


@contextmanager
def _open_body(path: Path, sha256: str | None) -> Iterator["pyarrow.BufferReader"]:
    """The file's content, to be read as Parquet in the block."""
    import pyarrow

    try:
        content = path.read_bytes()
    except OSError as error:
        raise BodyError(f"cannot read body {path.name}: {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise BodyError(f"body {path.name} was recorded as {sha256[:12]}… but is {found[:12]}…")
    try:
        yield pyarrow.BufferReader(content)
    except (pyarrow.ArrowException, KeyError) as error:
        raise BodyError(f"body {path.name} is damaged: {error}") from error


def sync_to_disk(path: Path) -> None:
    """Has a file, or the names in a folder, written to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
