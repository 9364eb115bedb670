"""The index entries of a step's rollouts as plain JSON, and as a column of their file.

The journal of a run names the file instead of repeating what it holds.
"""

import json
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_registry.column_values import encode_plain_json
from rlx_registry.errors import BodyError
from rlx_registry.records import PREVIEW_LENGTH, RolloutIndex
from rlx_registry.rollout_files import read_body_column

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "INDEX_COLUMN",
    "INDEX_FIELDS",
    "add_index_column",
    "build_index_row",
    "read_index_rows",
    "replace_non_finite",
]

INDEX_COLUMN = "index"
"""Column with the entries of a tree's rows, each as JSON."""
INDEX_FIELDS = tuple(RolloutIndex.__dataclass_fields__)


def add_index_column(table: "pyarrow.Table", index: Sequence[RolloutIndex]) -> "pyarrow.Table":
    """Adds the index entries of a step to its table, which has one record per tree."""
    import pyarrow

    entries: dict[int, list[str]] = {}
    for item in index:
        entries.setdefault(item.tree, []).append(encode_plain_json(build_index_row(item)))
    column = [entries.get(tree, []) for tree in table.column("tree").to_pylist()]
    return table.append_column(
        pyarrow.field(INDEX_COLUMN, pyarrow.list_(pyarrow.string())),
        pyarrow.array(column, type=pyarrow.list_(pyarrow.string())),
    )


def read_index_rows(path: Path | str, sha256: str | None) -> list[dict[str, Any]]:
    """Reads the index entries from a step's file, by row number.

    Raises:
        BodyError: the file is missing, is not the one recorded, or has no valid entries.
    """
    try:
        rows = [
            json.loads(entry)
            for entries in read_body_column(path, sha256, INDEX_COLUMN)
            for entry in entries
        ]
        if any(row.keys() != set(INDEX_FIELDS) for row in rows):
            raise ValueError("an index entry has other fields than this version expects")
        return sorted(rows, key=lambda row: int(row["row"]))
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise BodyError(f"body {Path(path).name} has no readable index: {error}") from error


def replace_non_finite(value: Any) -> Any:
    """Replaces non-finite numbers by None at any depth, because JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build_index_row(item: RolloutIndex) -> dict[str, Any]:
    """Returns an index entry as plain JSON.

    Raises:
        ValueError: its reward or its advantage is not finite.
    """
    row = dict(zip(INDEX_FIELDS, attrgetter(*INDEX_FIELDS)(item), strict=True))
    for name in ("reward", "advantage"):
        if row[name] is not None and not math.isfinite(row[name]):
            raise ValueError(f"row {item.row}: {name} is {row[name]}")
    row["rewards"], row["scores"] = (
        replace_non_finite(item.rewards),
        replace_non_finite(item.scores),
    )
    row["preview"] = item.preview[:PREVIEW_LENGTH]
    return row
