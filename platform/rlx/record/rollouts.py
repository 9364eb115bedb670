"""Store the rollouts of a step as a Parquet table, one record per tree, and build its SQL index.

Nested lists keep a tree together: `segments` as sampled and scored, `rows` as trained. Per-token
lists of a row start at token `start` and cover its own tokens and those between them; a null list
means that the step has no such stream. The table suffices to recompute the step's credit:
`rlx.record.rollout_reader` reads it back.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Final, Literal, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rlx.record.reward_entries import encode_entries, encode_values
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, Pieces, RolloutTree, Segment
from rlx.text import replace_surrogates
from rlx_registry import (
    STREAMS,
    RolloutIndex,
    RowRecord,
    ScoreRecord,
    SegmentRecord,
    TreeRecord,
    build_arrow_type,
)

__all__ = [
    "PIECES",
    "SCHEMA",
    "SCORE_COLUMNS",
    "TOKEN_COLUMNS",
    "Role",
    "TrainedRows",
    "add_piece_column",
    "get_stored_score_name",
    "rollout_index",
    "rollout_table",
]

AT_ONCE = 32
"""Trees that are converted to columns together."""

Role = Literal["trained", "filtered", "greedy"]
"""Role of a tree: trained on, filtered out for lack of signal, or sampled as a greedy baseline."""

SCHEMA = pa.schema(build_arrow_type(TreeRecord))

TOKEN_COLUMNS: Final[Mapping[str, torch.dtype]] = {
    stream.stored_name: getattr(torch, stream.dtype)
    for stream in STREAMS.values()
    if stream.is_stored and stream.shape != "[B]"
}
"""Types of the values stored per token of a row."""
SCORE_COLUMNS: Final = tuple(field.name for field in build_arrow_type(ScoreRecord))
"""Scores stored per row."""

_STORED_NAMES = {"masked_return_sum": "seed_returns_score"}

PIECES = pa.field("pieces", pa.list_(pa.list_(pa.string())))
"""Text of each token of each segment, for readers without a tokenizer; not used in computations."""


def get_stored_score_name(name: str) -> str:
    """The name under which a score is stored: that of a store's first version, so that curves of a
    resumed run go on and runs of any version compare."""
    return _STORED_NAMES.get(name, name)


@dataclass(frozen=True, eq=False)
class TrainedRows:
    """The trained rows of a step.

    Attributes:
        places: (tree, segment, parent segment, kind, level) of each row.
        groups: `[B]` int64 group of each row.
        own: `[B, T]` bool tokens of the row itself. The stored range covers these and every token
            in the loss mask.
        tokens: `[B, T]` by names of `TOKEN_COLUMNS`; None, or missing, if the step has none.
        scores: `[B]` by names of `SCORE_COLUMNS`; missing if the step has none.
    """

    places: Sequence[tuple[int, int, int, str, int]]
    groups: Tensor
    own: Tensor
    tokens: Mapping[str, Tensor | None]
    scores: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for known, columns in ((TOKEN_COLUMNS, self.tokens), (SCORE_COLUMNS, self.scores)):
            if unknown := sorted(columns.keys() - set(known)):
                raise ValueError(f"no column is called {', '.join(unknown)}")

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Half-open range of the stored tokens of each row."""
        mask = self.tokens.get("mask")
        kept = (self.own if mask is None else self.own | mask).int()
        first = kept.argmax(dim=1).tolist()
        last = (kept.shape[1] - kept.flip(1).argmax(dim=1)).tolist()
        return list(zip(first, last, strict=True))

    @cached_property
    def arrays(self) -> dict[str, np.ndarray[Any, Any] | None]:
        """`tokens` as NumPy arrays, which are far cheaper to slice than tensors."""
        tensors = {name: self.tokens.get(name) for name in TOKEN_COLUMNS}
        return {n: None if tensor is None else tensor.numpy() for n, tensor in tensors.items()}

    @cached_property
    def _scores(self) -> list[dict[str, float | None]]:
        columns = [values.tolist() for values in self.scores.values()]
        if not columns:
            return [{} for _ in self.places]
        return [dict(zip(self.scores, row, strict=True)) for row in zip(*columns, strict=True)]

    def record(self, row: int) -> RowRecord:
        """One row as a record of the schema."""
        _, segment, parent, kind, level = self.places[row]
        start, stop = self.ranges[row]
        record = {
            "row": row,
            "segment": segment,
            "parent": parent,
            "kind": kind,
            "level": level,
            "group": int(self.groups[row]),
            "start": start,
            **{
                name: None if array is None else array[row, start:stop]
                for name, array in self.arrays.items()
            },
            "scores": self.get_row_scores(row),
        }
        return cast("RowRecord", record)

    def get_row_scores(self, row: int) -> dict[str, float | None]:
        """The scores of one row, by name."""
        return dict(self._scores[row])


def rollout_table(
    trees: Sequence[RolloutTree],
    rewards: RewardTable,
    rows: TrainedRows,
    roles: Sequence[Role] | None = None,
) -> pa.Table:
    """Builds the table of a step: sampled trees, their rewards, and the trained rows.

    Args:
        trees: all trees, including those without trained rows.
        rewards: rewards of the trees.
        rows: the trained rows.
        roles: role of each tree; None means that all were trained on.
    """
    trained: dict[int, list[int]] = {}
    for row, place in enumerate(rows.places):
        trained.setdefault(place[0], []).append(row)

    all_trained: Sequence[Role] = ["trained"] * len(trees)
    pairs = list(zip(trees, roles or all_trained, strict=True))

    def build_record(t: int) -> TreeRecord:
        tree, role = pairs[t]
        return {
            "tree": t,
            "role": role,
            "problem_id": tree.problem.id,
            "prompt": tree.problem.prompt,
            "system": tree.problem.system,
            "problem": encode_values(tree.problem.fields),
            "stratum": tree.problem.stratum,
            "segments": [
                _build_segment_record(x, (t, s), rewards) for s, x in enumerate(tree.segments)
            ],
            "rows": [rows.record(row) for row in trained.get(t, ())],
        }

    parts = [
        pa.Table.from_pylist([build_record(t) for t in some], schema=SCHEMA)
        for some in _split_positions(len(trees))
    ]
    return pa.concat_tables(parts) if parts else SCHEMA.empty_table()


def _split_positions(count: int) -> Iterator[range]:
    """Yields the positions of few trees at a time: a large step as Python lists would take several
    times the memory of its table."""
    for start in range(0, count, AT_ONCE):
        yield range(start, min(start + AT_ONCE, count))


def add_piece_column(table: pa.Table, trees: Sequence[RolloutTree], pieces: Pieces) -> pa.Table:
    """Adds a column with the text of each token to a step's table."""
    texts = [
        pa.array(
            [
                [list(map(replace_surrogates, pieces(segment.token_ids))) for segment in segments]
                for segments in (trees[t].segments for t in some)
            ],
            type=PIECES.type,
        )
        for some in _split_positions(len(trees))
    ]
    return table.append_column(PIECES, pa.chunked_array(texts, type=PIECES.type))


def _build_segment_record(
    segment: Segment, place: tuple[int, int], rewards: RewardTable
) -> SegmentRecord:
    spans = {
        name: {"outer": span.outer, "inner": span.inner, "text": span.text}
        for name, span in segment.spans.items()
    }
    whole = rewards.rollouts.get(place)
    return {
        "parent": segment.parent,
        "author": segment.author,
        "turn": segment.turn,
        "kind": segment.kind,
        "token_ids": list(segment.token_ids),
        "behaviour_logprobs": list(segment.logprobs),
        "finish_reason": segment.finish_reason,
        "text": replace_surrogates(segment.text),
        "spans": json.dumps(spans),
        "hull": None if segment.hull is None else list(segment.hull),
        "seed": segment.seed,
        "sampled_after": None,
        "info": encode_values(segment.info),
        "rewards": encode_entries(rewards.turns.get(place, {})),
        "global_rewards": None if whole is None else encode_entries(whole),
        "dropped": place in rewards.dropped,
    }


def rollout_index(
    trees: Sequence[RolloutTree], rewards: RewardTable, rows: TrainedRows
) -> list[RolloutIndex]:
    """Builds the SQL index of the trained rows, so that lists and filters need no body."""
    row_of = {(place[0], place[1]): row for row, place in enumerate(rows.places)}
    return [
        _index_row(row, trees[place[0]], rewards, rows, row_of)
        for row, place in enumerate(rows.places)
    ]


def _index_row(
    row: int,
    grown: RolloutTree,
    rewards: RewardTable,
    rows: TrainedRows,
    row_of: Mapping[tuple[int, int], int],
) -> RolloutIndex:
    """Index entry of one row; a reward that several turns have is averaged over those turns."""
    tree, segment, parent, kind, _ = rows.places[row]
    turn, (own, _) = grown.segments[segment], grown.own_turns(segment)
    entries = list(_list_row_entries(rewards, tree, own))
    values: dict[str, list[float]] = {}
    for _, e in entries:
        values.setdefault(e.name, []).extend(() if e.raw is None else (e.raw,))
    several = len(own) > 1
    failures = [
        f"turn {number}, {e.name}: {e.reason}" if several and number else f"{e.name}: {e.reason}"
        for number, e in entries
        if e.reason
    ]
    start, stop = rows.ranges[row]
    return RolloutIndex(
        row=row,
        parent_row=None if parent == NO_PARENT else row_of.get((tree, parent)),
        tree=tree,
        group=int(rows.groups[row]),
        turn=kind,
        problem_id=grown.problem.id,
        reward=rewards.total_score(tree, own),
        rewards={name: fmean(raws) if raws else None for name, raws in values.items()},
        scores=rows.get_row_scores(row),
        advantage=_mean_advantage(rows, row),
        n_tokens=stop - start,
        finish_reason=turn.finish_reason,
        preview=turn.text[:160],
        failed="; ".join(failures) or None,
    )


def _list_row_entries(
    rewards: RewardTable, tree: int, own: Sequence[int]
) -> Iterable[tuple[int, RewardEntry]]:
    """Yields (turn number, reward entry) of a row: its turns in order, counted from 1, then the
    global rewards with number 0."""
    for number, segment in enumerate(own, start=1):
        yield from ((number, entry) for entry in rewards.turns[tree, segment].values())
    yield from ((0, e) for e in rewards.rollouts.get((tree, own[-1]), {}).values())


def _mean_advantage(rows: TrainedRows, row: int) -> float:
    """Mean advantage over the tokens in the mask; 0 if there are none."""
    mask, advantages = rows.arrays["mask"], rows.arrays["advantages"]
    if mask is None or advantages is None or not mask[row].any():
        return 0.0
    return float(advantages[row][mask[row]].mean())
