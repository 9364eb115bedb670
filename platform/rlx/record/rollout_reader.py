"""Read a recorded step back from its Parquet table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rlx.errors import RegistryError
from rlx.plugin import Problem
from rlx.record.reward_entries import read_entries
from rlx.record.rollouts import (
    PIECES,
    SCHEMA,
    SCORE_COLUMNS,
    TOKEN_COLUMNS,
    Role,
    TrainedRows,
)
from rlx.reward import RewardTable
from rlx.rollout import RolloutTree, Segment, Span, join_spans
from rlx_registry import INDEX_COLUMN

__all__ = ["StoredStep", "read_step"]


@dataclass(frozen=True, eq=False)
class StoredStep:
    """One recorded step.

    Attributes:
        trees: all trees, including those without trained rows.
        rewards: rewards of the trees.
        rows: trained rows, in the order of `list_batch_rows`; T is that of the batch. Tensors are 0
            for tokens that were not stored; `own` marks the stored ones.
        roles: why each tree was sampled.
    """

    trees: tuple[RolloutTree, ...]
    rewards: RewardTable
    rows: TrainedRows
    roles: tuple[Role, ...]


def read_step(table: pa.Table) -> StoredStep:
    """Rebuilds a step from its body, bit for bit.

    Args:
        table: made by `rollout_table` and read by `rlx_registry.read_body`.

    Raises:
        RegistryError: the columns differ, because another version of rlx wrote the table.
    """
    unused = {PIECES.name, INDEX_COLUMN}.intersection(table.column_names)
    table = table.drop_columns(sorted(unused))
    table = _add_missing_columns(table)
    if not table.schema.equals(SCHEMA):
        raise RegistryError(
            "these rollouts were recorded by another version of rlx, with other columns; use that "
            "version to read them"
        )
    records = table.drop_columns(["rows"]).to_pylist()
    trees = tuple(
        RolloutTree(_parse_problem(r), tuple(_parse_segment(s) for s in r["segments"]))
        for r in records
    )
    return StoredStep(
        trees=trees,
        rewards=_parse_reward_table(records),
        rows=_parse_trained_rows(table, trees),
        roles=tuple(r["role"] for r in records),
    )


def _add_missing_columns(table: pa.Table) -> pa.Table:
    """A table of an earlier version, with nulls for what it does not have."""
    earlier, now = _list_fields(table.schema), _list_fields(SCHEMA)
    later = {
        "segments.hull",
        "segments.sampled_after",
        *(f"rows.{name}" for name in TOKEN_COLUMNS if name != "mask"),
    }
    return table.cast(SCHEMA) if earlier <= now <= earlier | later else table


def _list_fields(schema: pa.Schema) -> set[str]:
    """Names of the fields of each record, those of records in lists as "LIST.NAME"."""
    lists = [field for field in schema if pa.types.is_list(field.type)]
    inner = {f"{one.name}.{f.name}" for one in lists for f in one.type.value_type}
    return {*schema.names, *inner}


def _parse_problem(record: Mapping[str, Any]) -> Problem:
    return Problem(
        id=record["problem_id"],
        prompt=record["prompt"],
        fields=json.loads(record["problem"]),
        stratum=record["stratum"],
        system=record["system"],
    )


def _parse_segment(stored: Mapping[str, Any]) -> Segment:
    spans = {
        name: Span(tuple(span["outer"]), tuple(span["inner"]), span["text"])
        for name, span in json.loads(stored["spans"]).items()
    }
    return Segment(
        parent=stored["parent"],
        author=stored["author"],
        token_ids=tuple(stored["token_ids"]),
        turn=stored["turn"],
        kind=stored["kind"],
        logprobs=tuple(stored["behaviour_logprobs"]),
        finish_reason=stored["finish_reason"],
        text=stored["text"],
        spans=spans,
        hull=_parse_hull(stored["hull"], spans),
        seed=stored["seed"],
        info=json.loads(stored["info"]),
    )


def _parse_hull(stored: list[int] | None, spans: Mapping[str, Span]) -> tuple[int, int] | None:
    """The hull of a turn; in a table that has none it covers the spans that are closed."""
    if stored is None:
        return join_spans(spans)
    first, last = stored
    return first, last


def _parse_reward_table(records: Sequence[Mapping[str, Any]]) -> RewardTable:
    segments = {(t, s): x for t, r in enumerate(records) for s, x in enumerate(r["segments"])}
    turns = {
        place: read_entries(x["rewards"])
        for place, x in segments.items()
        if x["author"] == "policy"
    }
    rollouts = {
        place: read_entries(x["global_rewards"])
        for place, x in segments.items()
        if x["global_rewards"] is not None
    }
    faults: dict[str, int] = {}
    for entries in (*turns.values(), *rollouts.values()):
        for entry in entries.values():
            if entry.is_fault:
                faults[entry.name] = faults.get(entry.name, 0) + 1
    dropped = frozenset(place for place, x in segments.items() if x["dropped"])
    return RewardTable(turns, dropped, faults, rollouts)


def _parse_trained_rows(table: pa.Table, trees: Sequence[RolloutTree]) -> TrainedRows:
    """Rows in order of their number, which counts across all trees of the step."""
    lists = table["rows"].combine_chunks()
    tree = np.repeat(table["tree"].to_numpy(), lists.value_lengths().to_numpy())
    flat = pa.Table.from_struct_array(lists.flatten()).append_column("tree", pa.array(tree))
    flat = flat.sort_by("row").combine_chunks()
    columns = ("tree", "segment", "parent", "kind", "level")
    places = list(zip(*(flat[name].to_pylist() for name in columns), strict=True))
    length = max((trees[t].count_tokens(s) for t, s, *_ in places), default=0)
    starts, lengths = (
        flat["start"].to_numpy(),
        _get_column_array(flat, "mask").value_lengths().to_numpy(),
    )
    positions = np.arange(length)
    kept = (positions >= starts[:, None]) & (positions < (starts + lengths)[:, None])
    return TrainedRows(
        places=places,
        groups=torch.from_numpy(flat["group"].to_numpy().astype(np.int64)),
        own=torch.from_numpy(kept),
        tokens={
            name: _pad_token_lists(_get_column_array(flat, name), kept) for name in TOKEN_COLUMNS
        },
        scores=_parse_row_scores(flat),
    )


def _get_column_array(flat: pa.Table, name: str) -> Any:
    """A column as one contiguous array."""
    return flat[name].combine_chunks()


def _pad_token_lists(lists: Any, kept: np.ndarray) -> Tensor | None:
    """`[B, T]` list values at the stored positions, 0 elsewhere; None if all lists are null."""
    if len(lists) and lists.null_count == len(lists):
        return None
    values = lists.flatten().to_numpy(zero_copy_only=False)
    padded = np.zeros(kept.shape, dtype=values.dtype)
    padded[kept] = values
    return torch.from_numpy(padded)


def _parse_row_scores(flat: pa.Table) -> dict[str, Tensor]:
    """`[B]` each; only scores that the step has."""
    columns = pa.Table.from_struct_array(_get_column_array(flat, "scores"))
    return {
        name: torch.from_numpy(columns[name].to_numpy().copy())
        for name in SCORE_COLUMNS
        if not columns[name].null_count
    }
