"""Every rollout of a step as one Parquet table, one record per tree, and its index for SQL.

Nested lists keep a tree together: `segments` as they were sampled and scored, `rows` as they were
trained. Per-token lists of a row cover its own tokens and what lies between them, from `start` on;
a list that is null was no part of the step. Together they are enough to do the step's sums again:
`rlx.record.rollout_reader` reads them back.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rlx.record.reward_entries import ENTRIES, encode_entries, encode_values
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, Pieces, RolloutTree, Segment
from rlx_registry import RolloutIndex

__all__ = [
    "PIECES",
    "SCHEMA",
    "SCORE_COLUMNS",
    "TOKEN_COLUMNS",
    "Role",
    "TrainedRows",
    "add_piece_column",
    "rollout_index",
    "rollout_table",
]

Role = Literal["trained", "filtered", "greedy"]
"""Why a tree was sampled: to be trained on, so too but found without signal, or as a baseline."""

TOKEN_COLUMNS: Final[Mapping[str, torch.dtype]] = {
    "mask": torch.bool,
    "weights": torch.float32,
    "advantages": torch.float32,
    "old_logprobs": torch.float32,
    "reference_logprobs": torch.float32,
    "values": torch.float32,
    "placed": torch.float32,
    "token_rewards": torch.float32,
    "kl": torch.float32,
    "returns": torch.float32,
    "step_ids": torch.int64,
    "mc_values": torch.float32,
}
"""What is kept of every token of a row, under the names of `rlx.step`; `mc_values` is the value of
the state that the token's step begins in."""

SCORE_COLUMNS: Final = ("total_score", "token_level_scores", "seed_returns_score", "greedy_score")
"""What is kept of every row; `greedy_score` is that of its prompt's greedy answer."""

_ARROW = {torch.bool: pa.bool_(), torch.float32: pa.float32(), torch.int64: pa.int64()}
_SEGMENT = pa.struct(
    [
        ("parent", pa.int32()),
        ("author", pa.string()),
        ("turn", pa.int32()),
        ("kind", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("behaviour_logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("text", pa.string()),
        ("spans", pa.string()),
        ("seed", pa.int64()),
        ("info", pa.string()),
        ("rewards", ENTRIES),
        # Of the whole rollout that ends here; null where none does.
        ("global_rewards", ENTRIES),
        ("dropped", pa.bool_()),
    ]
)
_ROW = pa.struct(
    [
        ("row", pa.int32()),
        ("segment", pa.int32()),
        ("parent", pa.int32()),
        ("kind", pa.string()),
        ("level", pa.int32()),
        ("group", pa.int32()),
        ("start", pa.int32()),
        *((name, pa.list_(_ARROW[dtype])) for name, dtype in TOKEN_COLUMNS.items()),
        ("scores", pa.struct([(name, pa.float32()) for name in SCORE_COLUMNS])),
    ]
)
SCHEMA = pa.schema(
    [
        ("tree", pa.int32()),
        ("role", pa.string()),
        ("problem_id", pa.string()),
        ("prompt", pa.string()),
        ("system", pa.string()),
        ("problem", pa.string()),
        ("stratum", pa.string()),
        ("segments", pa.list_(_SEGMENT)),
        ("rows", pa.list_(_ROW)),
    ]
)
PIECES = pa.field("pieces", pa.list_(pa.list_(pa.string())))
"""For each segment the text of each token: for readers without a tokenizer; no sum needs it."""


@dataclass(frozen=True, eq=False)
class TrainedRows:
    """The trained rows of a step.

    Attributes:
        places: for each row its (tree, segment, parent segment, kind, level).
        groups: `[B]` int64 group of each row.
        own: `[B, T]` bool tokens of the row itself; what lies between its first and its last is
            kept, and any other token that learns.
        tokens: `[B, T]` under names of `TOKEN_COLUMNS`; None, or no such name, where the step has
            none.
        scores: `[B]` under names of `SCORE_COLUMNS`; likewise.
    """

    places: Sequence[tuple[int, int, int, str, int]]
    groups: Tensor
    own: Tensor
    tokens: Mapping[str, Tensor | None]
    scores: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for known, given in ((TOKEN_COLUMNS, self.tokens), (SCORE_COLUMNS, self.scores)):
            if unknown := sorted(given.keys() - set(known)):
                raise ValueError(f"no column is called {', '.join(unknown)}")

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """For each row the half-open range of the tokens that are kept."""
        mask = self.tokens.get("mask")
        kept = (self.own if mask is None else self.own | mask).int()
        first = kept.argmax(dim=1).tolist()
        last = (kept.shape[1] - kept.flip(1).argmax(dim=1)).tolist()
        return list(zip(first, last, strict=True))

    @cached_property
    def arrays(self) -> dict[str, np.ndarray[Any, Any] | None]:
        """`tokens` as arrays, of which a slice costs far less than one of a tensor."""
        given = {name: self.tokens.get(name) for name in TOKEN_COLUMNS}
        return {n: None if tensor is None else tensor.numpy() for n, tensor in given.items()}

    @cached_property
    def _scores(self) -> list[dict[str, float | None]]:
        columns = [values.tolist() for values in self.scores.values()]
        if not columns:
            return [{} for _ in self.places]
        return [dict(zip(self.scores, row, strict=True)) for row in zip(*columns, strict=True)]

    def record(self, row: int) -> dict[str, Any]:
        """One row under the names of the schema."""
        _, segment, parent, kind, level = self.places[row]
        start, stop = self.ranges[row]
        return {
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

    def get_row_scores(self, row: int) -> dict[str, float | None]:
        """The scores of one row that there are."""
        return dict(self._scores[row])


def rollout_table(
    trees: Sequence[RolloutTree],
    rewards: RewardTable,
    rows: TrainedRows,
    roles: Sequence[Role] | None = None,
) -> pa.Table:
    """The whole step: what was sampled, what it scored, what was learned from it.

    Args:
        trees: all of them, those without trained rows included.
        rewards: theirs.
        rows: what was trained on.
        roles: of each tree; all were trained on where None.
    """
    trained: dict[int, list[dict[str, Any]]] = {}
    for row, place in enumerate(rows.places):
        trained.setdefault(place[0], []).append(rows.record(row))
    records = [
        {
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
            "rows": trained.get(t, []),
        }
        for t, (tree, role) in enumerate(zip(trees, roles or ["trained"] * len(trees), strict=True))
    ]
    return pa.Table.from_pylist(records, schema=SCHEMA)


def add_piece_column(table: pa.Table, trees: Sequence[RolloutTree], pieces: Pieces) -> pa.Table:
    """The step with the texts of its tokens, a column more."""
    texts = [
        [_replace_surrogates(pieces(segment.token_ids)) for segment in tree.segments]
        for tree in trees
    ]
    return table.append_column(PIECES, pa.array(texts, type=PIECES.type))


def _replace_surrogates(pieces: Iterable[str]) -> list[str]:
    """What UTF-8 can hold: a lone surrogate is no character."""
    return [piece.encode("utf-8", "replace").decode("utf-8") for piece in pieces]


def _build_segment_record(
    segment: Segment, place: tuple[int, int], rewards: RewardTable
) -> dict[str, Any]:
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
        "token_ids": segment.token_ids,
        "behaviour_logprobs": segment.logprobs,
        "finish_reason": segment.finish_reason,
        "text": segment.text,
        "spans": json.dumps(spans),
        "seed": segment.seed,
        "info": encode_values(segment.info),
        "rewards": encode_entries(rewards.turns.get(place, {})),
        "global_rewards": None if whole is None else encode_entries(whole),
        "dropped": place in rewards.dropped,
    }


def rollout_index(
    trees: Sequence[RolloutTree], rewards: RewardTable, rows: TrainedRows
) -> list[RolloutIndex]:
    """What SQL keeps of every trained row, so that lists and filters need no body."""
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
    """One row; of a reward that several of its turns have, the mean over those turns."""
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
    """The rewards of a row's turns in order, each with its turn's place from 1; then, with 0,
    those of the whole."""
    for number, segment in enumerate(own, start=1):
        yield from ((number, entry) for entry in rewards.turns[tree, segment].values())
    yield from ((0, e) for e in rewards.rollouts.get((tree, own[-1]), {}).values())


def _mean_advantage(rows: TrainedRows, row: int) -> float:
    """Over the tokens that learn; 0 where none does."""
    mask, advantages = rows.arrays["mask"], rows.arrays["advantages"]
    if mask is None or advantages is None or not mask[row].any():
        return 0.0
    return float(advantages[row][mask[row]].mean())
