"""Reward entries as they lie in a body's column, and back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rlx.reward import RewardEntry

__all__ = ["ENTRIES", "encode_entries", "encode_values", "read_entries"]

ENTRIES = pa.list_(
    pa.struct(
        [
            ("name", pa.string()),
            ("raw", pa.float64()),
            ("weight", pa.float64()),
            ("status", pa.string()),
            ("reason", pa.string()),
            ("parts", pa.string()),
        ]
    )
)
"""A column of what one turn or rollout got."""


def encode_entries(entries: Mapping[str, RewardEntry]) -> list[dict[str, Any]]:
    """One cell of such a column."""
    return [
        {
            "name": e.name,
            "raw": e.raw,
            "weight": e.weight,
            "status": e.status,
            "reason": e.reason,
            "parts": encode_values(e.parts),
        }
        for e in entries.values()
    ]


def encode_values(values: Mapping[str, Any]) -> str:
    """A JSON object; most that are recorded are empty, and thousands are in a step."""
    return json.dumps(dict(values)) if values else "{}"


def read_entries(stored: Sequence[Mapping[str, Any]]) -> dict[str, RewardEntry]:
    """What one cell was made of."""
    return {e["name"]: RewardEntry(**{**e, "parts": json.loads(e["parts"])}) for e in stored}
