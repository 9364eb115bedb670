"""Rollout files ("bodies"): one Parquet file per step, identified by its SHA-256 digest."""

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_registry.errors import BodyError
from rlx_registry.rollout_records import TreeRecord, check_tree_record

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "read_body",
    "read_body_column",
    "read_trees",
    "search_body_trees",
    "sync_to_disk",
    "write_body",
]

GROUP = 2**21
"""Uncompressed bytes of a row group, the unit that a reader of one tree has to decode."""


def write_body(path: Path | str, table: "pyarrow.Table") -> tuple[str, int]:
    """Writes a table atomically, as Parquet with zstd compression.

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
    sync_to_disk(path.parent)  # a rename survives a power failure only once its folder is synced
    return digest, size


def _build_parquet_options(table: "pyarrow.Table") -> dict[str, Any]:
    """Small row groups, because pages read few records. No dictionary encoding: token values
    repeat too rarely for it to save time or space."""
    records = max(1, table.num_rows * GROUP // max(1, table.nbytes))
    return {"compression": "zstd", "use_dictionary": False, "row_group_size": records}


def read_body(path: Path | str, sha256: str | None = None) -> "pyarrow.Table":
    """Reads a table written by `write_body`.

    Args:
        sha256: the recorded digest; None skips the comparison.

    Raises:
        BodyError: the file is missing, is not the one recorded, or is not Parquet.
    """
    from pyarrow import parquet

    with _open_body(Path(path), sha256) as source:
        return parquet.read_table(source)


def read_body_column(path: Path | str, sha256: str | None, name: str) -> list[Any]:
    """Reads one column of a table written by `write_body`.

    Raises:
        BodyError: as `read_body`, or there is no such column.
    """
    from pyarrow import parquet

    with _open_body(Path(path), sha256) as source:
        found: list[Any] = parquet.read_table(source, columns=[name]).column(name).to_pylist()
        return found


def read_trees(path: Path | str, sha256: str | None, trees: Collection[int]) -> list[TreeRecord]:
    """Reads the records of some trees of a step's rollouts.

    Raises:
        BodyError: as `read_body`, or the file does not contain rollouts.
    """
    from pyarrow import parquet

    with _open_body(Path(path), sha256) as source:
        table = parquet.read_table(source, filters=[("tree", "in", list(trees))])
        found: list[TreeRecord] = table.to_pylist()
        for tree in found:
            check_tree_record(tree)
        return found


def search_body_trees(path: Path | str, sha256: str | None, text: str) -> set[int]:
    """Returns the trees of a step whose text below the prompt contains `text`, ignoring case.

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
            if any(wanted in (one["text"] or "").casefold() for one in record["segments"][1:])
        }


@contextmanager
def _open_body(path: Path, sha256: str | None) -> Iterator["pyarrow.BufferReader"]:
    """Checks the file's digest and yields its content, to be read as Parquet in the block."""
    import pyarrow

    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise BodyError(f"cannot read body {path.name}: not a regular file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BodyError(f"cannot read body {path.name}: {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise BodyError(f"body {path.name} was recorded as {sha256[:12]}… but is {found[:12]}…")
    try:
        yield pyarrow.BufferReader(content)
    except (pyarrow.ArrowException, KeyError, RecursionError, TypeError, ValueError) as error:
        raise BodyError(f"body {path.name} is damaged: {error}") from error


def sync_to_disk(path: Path) -> None:
    """Calls fsync on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
