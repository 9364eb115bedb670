"""What a large step is made of: who does which part, and what ranks are told."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PARTS", "RECORDED", "Order"]

SHARE, EVERY, FIRST = "each rank, its share", "every rank, all", "first rank, all"
RECORDED = {
    "rollout_index": "index rows",
    "rollout_table": "table",
    "add_piece_column": "text of tokens",
    "add_index_column": "index column",
    "write_body": "Parquet file",
}
"""Functions of `rlx.record.recorder`, and the part that each is."""
PARTS = {
    "scoring": SHARE,
    "gathering": EVERY,
    "rows": EVERY,
    "credit": EVERY,
    "packing": SHARE,
    "figures": EVERY,
    **dict.fromkeys(("trained rows", *RECORDED.values()), FIRST),
    **dict.fromkeys(("SQLite", "PostgreSQL"), FIRST),
}
"""Who does a part, and for how much of the step."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the ranks are to do.

    Attributes:
        folder: where the first rank writes the run.
        shape: sizes of the whole step.
        registries: URLs of empty registries by name; the first is written with the body.
    """

    folder: str
    shape: tuple[int, ...]
    registries: Mapping[str, str]
