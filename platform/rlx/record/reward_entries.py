"""Encode reward entries for a Parquet column, and decode them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.reward import RewardEntry
from rlx_registry import RewardRecord, build_arrow_type

__all__ = ["ENTRIES", "encode_entries", "encode_values", "read_entries"]

ENTRIES = build_arrow_type(list[RewardRecord])
"""Type of a column with the reward entries of a turn or rollout."""


def encode_entries(entries: Mapping[str, RewardEntry]) -> list[RewardRecord]:
    """Encodes reward entries as one cell of an `ENTRIES` column."""
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
    """Encodes a mapping as JSON, with a fast path for the many empty ones of a step."""
    return json.dumps(dict(values)) if values else "{}"


def read_entries(stored: Sequence[RewardRecord]) -> dict[str, RewardEntry]:
    """Decodes one cell of an `ENTRIES` column, by reward name."""
    return {
        e["name"]: RewardEntry(
            e["name"], e["raw"], e["weight"], e["status"], e["reason"], json.loads(e["parts"])
        )
        for e in stored
    }
