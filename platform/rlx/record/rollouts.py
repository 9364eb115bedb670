"""Every rollout of a step as one Parquet table, one record per tree, and its index for SQL.

Nested lists keep a tree together: `segments` as they were sampled, `rows` as they were trained.
Per-token lists of a row cover its own tokens, from `start` to the end of the row.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from torch import Tensor

from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx_registry import RolloutIndex

__all__ = ["SCHEMA", "TrainedRows", "rollout_index", "rollout_table"]

_REWARD = pa.struct(
    [
        ("name", pa.string()),
        ("raw", pa.float64()),
        ("weight", pa.float64()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("parts", pa.string()),
    ]
)
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
        ("rewards", pa.list_(_REWARD)),
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
        ("mask", pa.list_(pa.bool_())),
        ("weights", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("old_logprobs", pa.list_(pa.float32())),
    ]
)
SCHEMA = pa.schema(
    [
        ("tree", pa.int32()),
        ("problem_id", pa.string()),
        ("prompt", pa.string()),
        ("problem", pa.string()),
        ("stratum", pa.string()),
        ("segments", pa.list_(_SEGMENT)),
        ("rows", pa.list_(_ROW)),
    ]
)


class TrainedRows:
    """The trained rows of a step, as plain lists.

    Args:
        places: for each row its (tree, segment, parent segment, kind, level).
        groups: `[B]` group of each row.
        own: `[B, T]` bool tokens of the row itself.
        mask: `[B, T]` bool tokens that learn.
        weights: `[B, T]` their weight in the loss.
        advantages: `[B, T]`.
        old_logprobs: `[B, T]` nats.
    """

    def __init__(
        self,
        places: Sequence[tuple[int, int, int, str, int]],
        groups: Tensor,
        own: Tensor,
        mask: Tensor,
        weights: Tensor,
        advantages: Tensor,
        old_logprobs: Tensor,
    ) -> None:
        self.places = places
        self.groups: list[int] = groups.tolist()
        first = own.int().argmax(dim=1).tolist()
        last = (own.shape[1] - own.flip(1).int().argmax(dim=1)).tolist()
        self.ranges = list(zip(first, last, strict=True))
        self.mask, self.weights = mask, weights
        self.advantages, self.old_logprobs = advantages, old_logprobs

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
            "group": self.groups[row],
            "start": start,
            "mask": self.mask[row, start:stop].numpy(),
            "weights": self.weights[row, start:stop].numpy(),
            "advantages": self.advantages[row, start:stop].numpy(),
            "old_logprobs": self.old_logprobs[row, start:stop].numpy(),
        }


def rollout_table(
    trees: Sequence[RolloutTree], rewards: RewardTable, rows: TrainedRows
) -> pa.Table:
    """The whole step: what was sampled, what it scored, what was learned from it."""
    trained: dict[int, list[dict[str, Any]]] = {}
    for row, place in enumerate(rows.places):
        trained.setdefault(place[0], []).append(rows.record(row))
    records = [
        {
            "tree": t,
            "problem_id": tree.problem.id,
            "prompt": tree.problem.prompt,
            "problem": json.dumps(dict(tree.problem.fields)),
            "stratum": tree.problem.stratum,
            "segments": [
                _segment(segment, rewards.turns.get((t, s), {}), (t, s) in rewards.dropped)
                for s, segment in enumerate(tree.segments)
            ],
            "rows": trained.get(t, []),
        }
        for t, tree in enumerate(trees)
    ]
    return pa.Table.from_pylist(records, schema=SCHEMA)


def _segment(segment: Segment, rewards: Mapping[str, RewardEntry], dropped: bool) -> dict[str, Any]:
    spans = {n: {"outer": s.outer, "inner": s.inner} for n, s in segment.spans.items()}
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
        "info": json.dumps(dict(segment.info)),
        "rewards": [
            {
                "name": e.name,
                "raw": e.raw,
                "weight": e.weight,
                "status": e.status,
                "reason": e.reason,
                "parts": json.dumps(dict(e.parts)),
            }
            for e in rewards.values()
        ],
        "dropped": dropped,
    }


def rollout_index(
    trees: Sequence[RolloutTree], rewards: RewardTable, rows: TrainedRows
) -> list[RolloutIndex]:
    """What SQL keeps of every trained row, so that lists and filters need no body."""
    row_of = {(place[0], place[1]): row for row, place in enumerate(rows.places)}
    index = []
    for row, (tree, segment, parent, kind, _) in enumerate(rows.places):
        turn = trees[tree].segments[segment]
        entries = rewards.turns[tree, segment]
        start, stop = rows.ranges[row]
        learned = rows.advantages[row, start:stop][rows.mask[row, start:stop]]
        failures = [f"{e.name}: {e.reason}" for e in entries.values() if e.reason]
        index.append(
            RolloutIndex(
                row=row,
                parent_row=None if parent == NO_PARENT else row_of.get((tree, parent)),
                tree=tree,
                group=rows.groups[row],
                turn=kind,
                problem_id=trees[tree].problem.id,
                reward=rewards.total((tree, segment)),
                rewards={name: e.raw for name, e in entries.items()},
                advantage=float(learned.mean()) if len(learned) else 0.0,
                n_tokens=stop - start,
                finish_reason=turn.finish_reason,
                preview=turn.text[:160],
                failed="; ".join(failures) or None,
            )
        )
    return index
