"""Store the rollouts of a step as a Parquet table, one record per tree, and build its SQL index.

Nested lists keep a tree together: `segments` as sampled and scored, `rows` as trained. Per-token
lists of a row start at token `start` and cover its own tokens and those between them; a null list
means that the step has no such stream. The table suffices to recompute the step's credit.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Final, Literal, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.errors import RegistryError
from rlx.plugin import Problem
from rlx.probe import ProbeResult, RecordedProbe
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, Pieces, RolloutTree, Segment, Span
from rlx.step import TokenStreams, TrainBatch
from rlx.text import replace_surrogates
from rlx_registry import (
    INDEX_COLUMN,
    STREAMS,
    Registry,
    RewardRecord,
    RolloutIndex,
    RowRecord,
    ScoreRecord,
    SegmentRecord,
    TreeRecord,
    build_arrow_type,
    get_score_name,
)

AT_ONCE = 32
"""Trees that are converted to columns together: a large step as Python lists would take several
times the memory of its table."""

Role = Literal["trained", "filtered", "greedy"]
"""Role of a tree: trained on, filtered out for lack of signal, or sampled as a greedy baseline."""

SCHEMA = pa.schema(build_arrow_type(TreeRecord))

TOKEN_COLUMNS: Final[Mapping[str, torch.dtype]] = {
    stream.stored_name: getattr(torch, stream.dtype)
    for stream in STREAMS.values()
    if stream.shape != "[B]"
}
"""Types of the values stored per token of a row."""

SCORE_COLUMNS: Final = tuple(field.name for field in build_arrow_type(ScoreRecord))
"""Scores stored per row."""


def spread_step_values(step_ids: Tensor, values: Tensor) -> Tensor:
    """`[B, T]` value of the state in which each token's step begins; 0 without a step."""
    known = step_ids >= 0
    return torch.where(known, values.gather(1, step_ids.clamp(min=0)), 0.0)


def collect_state_values(step_ids: Tensor, per_token: Tensor) -> Tensor:
    """Recovers the `[B, S + 1]` values from the result of `spread_step_values`: every step has
    tokens, and the value of the last state is 0."""
    steps = int(step_ids.max()) + 1
    nowhere = torch.where(step_ids < 0, steps + 1, step_ids)
    values = per_token.new_zeros(len(step_ids), steps + 2)
    return values.scatter(1, nowhere, per_token)[:, : steps + 1]


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

    @classmethod
    def from_batch(cls, train: TrainBatch) -> "TrainedRows":
        batch, scores = train.batch, dict(vars(train.scores))
        per_token: dict[str, Tensor | None] = {}
        for stream in STREAMS.values():
            values = train.find_stream(stream.name)
            if values is not None and stream.shape == "[B]":
                scores[stream.stored_name] = values
            elif values is not None and stream.shape == "[B, S + 1]":
                values = spread_step_values(train.streams.optional["step_ids"], values)
            if stream.shape != "[B]":
                per_token[stream.stored_name] = values
        places = [(r.tree, r.segment, r.parent, r.kind, r.level) for r in batch.rows]
        return cls(places, batch.group_ids, batch.is_own, per_token, scores)

    def read_streams(
        self,
        batch: TokenBatch,
        kept: Tensor,
        statistics: Mapping[str, Any],
        recomputed: Mapping[str, Tensor],
    ) -> TokenStreams:
        """The token streams of a batch of some of the rows, of which `[B]` `kept` are the numbers,
        with β and the estimator's state from the step's statistics; `recomputed` streams replace
        recorded ones. Raises RegistryError if the step was recorded without old log-probabilities.
        """
        width = batch.is_own.shape[1]
        old = self.tokens["old_logprobs"]
        if old is None:
            raise RegistryError("the step was recorded without old_logprobs")
        found: dict[str, Tensor] = {}
        for stream in (one for one in STREAMS.values() if one.is_optional):
            columns = self.scores if stream.shape == "[B]" else self.tokens
            values = columns.get(stream.stored_name)
            if values is None:
                continue
            found[stream.name] = values[kept] if stream.shape == "[B]" else values[kept][:, :width]
            if stream.dtype == "int64":
                found[stream.name] = torch.where(batch.is_own, found[stream.name], -1)
            if stream.shape == "[B, S + 1]":
                found[stream.name] = collect_state_values(found["step_ids"], found[stream.name])
        return TokenStreams(
            old_logprobs=old[kept][:, :width],
            optional={**found, **recomputed},
            beta=statistics["beta"],
            state=statistics["state_before"],
        )

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
        return {name: values[row].item() for name, values in self.scores.items()}


def rollout_table(
    trees: Sequence[RolloutTree],
    rewards: RewardTable,
    rows: TrainedRows,
    roles: Sequence[Role] | None = None,
    pieces: Pieces | None = None,
) -> pa.Table:
    """Builds the table of a step: all sampled trees, their rewards, and the trained rows. Without
    `roles` all trees were trained on; without `pieces` the texts of tokens are left out."""
    trained: dict[int, list[int]] = {}
    for row, place in enumerate(rows.places):
        trained.setdefault(place[0], []).append(row)

    def build_record(t: int) -> TreeRecord:
        tree = trees[t]
        return {
            "tree": t,
            "role": roles[t] if roles else "trained",
            "problem_id": tree.problem.id,
            "prompt": tree.problem.prompt,
            "system": tree.problem.system,
            "problem": encode_values(tree.problem.fields),
            "stratum": tree.problem.stratum,
            "segments": [
                _build_segment_record(x, (t, s), rewards) for s, x in enumerate(tree.segments)
            ],
            "rows": [rows.record(row) for row in trained.get(t, ())],
            "pieces": pieces
            and [list(map(replace_surrogates, pieces(s.token_ids))) for s in tree.segments],
        }

    parts = [
        pa.Table.from_pylist(
            [build_record(t) for t in range(first, min(first + AT_ONCE, len(trees)))], SCHEMA
        )
        for first in range(0, len(trees), AT_ONCE)
    ]
    return pa.concat_tables(parts) if parts else SCHEMA.empty_table()


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
    """Builds the SQL index of the trained rows, so that lists and filters need no body.

    A reward that several turns of a row have is averaged over them, and the advantage over the
    tokens in the mask.
    """
    row_of = {(place[0], place[1]): row for row, place in enumerate(rows.places)}
    mask, advantages = rows.arrays["mask"], rows.arrays["advantages"]
    index = []
    for row, (tree, segment, parent, kind, _) in enumerate(rows.places):
        grown, (start, stop) = trees[tree], rows.ranges[row]
        turn, (own, _) = grown.segments[segment], grown.own_turns(segment)
        # The rewards of its turns, counted from 1, then the global ones, with number 0.
        entries = [
            (number, entry)
            for number, one in enumerate(own, start=1)
            for entry in rewards.turns[tree, one].values()
        ]
        entries += [(0, e) for e in rewards.rollouts.get((tree, own[-1]), {}).values()]
        values: dict[str, list[float]] = {}
        for _, entry in entries:
            values.setdefault(entry.name, []).extend(() if entry.raw is None else (entry.raw,))
        failures = [
            f"turn {number}, {e.name}: {e.reason}"
            if number and len(own) > 1
            else f"{e.name}: {e.reason}"
            for number, e in entries
            if e.reason
        ]
        advantage = 0.0
        if mask is not None and advantages is not None and mask[row].any():
            advantage = float(advantages[row][mask[row]].mean())
        index.append(
            RolloutIndex(
                row=row,
                parent_row=None if parent == NO_PARENT else row_of.get((tree, parent)),
                tree=tree,
                group=int(rows.groups[row]),
                turn=kind,
                problem_id=grown.problem.id,
                reward=rewards.total_score(tree, own),
                rewards={name: fmean(raws) if raws else None for name, raws in values.items()},
                scores=rows.get_row_scores(row),
                advantage=advantage,
                n_tokens=stop - start,
                finish_reason=turn.finish_reason,
                preview=turn.text[:160],
                failed="; ".join(failures) or None,
            )
        )
    return index


@dataclass(frozen=True, eq=False)
class StoredStep:
    """One recorded step: its trees, why each was sampled, and their rewards.

    Attributes:
        rows: trained rows, in the order of `list_batch_rows`; T is that of the batch. Tensors are 0
            for tokens that were not stored; `own` marks the stored ones.
    """

    trees: tuple[RolloutTree, ...]
    rewards: RewardTable
    rows: TrainedRows
    roles: tuple[Role, ...]


def read_step(table: pa.Table) -> StoredStep:
    """Rebuilds a step from its body, bit for bit.

    Raises:
        RegistryError: the columns differ, because another version of rlx wrote the table.
    """
    unused = {INDEX_COLUMN}.intersection(table.column_names)
    try:
        table = _rename_scores(table.drop_columns(sorted(unused))).cast(SCHEMA)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise RegistryError(
            "these rollouts were recorded by another version of rlx, with other columns; use that "
            "version to read them"
        ) from error
    records = table.drop_columns(["rows", "pieces"]).to_pylist()
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


def _rename_scores(table: pa.Table) -> pa.Table:
    """A table whose scores have today's names; a cast would take others for missing ones."""
    lists = table["rows"].combine_chunks()
    rows = pa.Table.from_struct_array(lists.values)
    scores = pa.Table.from_struct_array(_get_column_array(rows, "scores"))
    scores = scores.rename_columns([get_score_name(name) for name in scores.column_names])
    rows = rows.set_column(
        rows.schema.get_field_index("scores"), "scores", scores.to_struct_array()
    )
    renamed = pa.ListArray.from_arrays(lists.offsets, rows.to_struct_array().combine_chunks())
    return table.set_column(table.schema.get_field_index("rows"), "rows", renamed)


def _parse_problem(record: Mapping[str, Any]) -> Problem:
    return Problem(
        id=record["problem_id"],
        prompt=record["prompt"],
        fields=json.loads(record["problem"]),
        stratum=record["stratum"],
        system=record["system"],
    )


def _parse_segment(stored: Mapping[str, Any]) -> Segment:
    return Segment(
        parent=stored["parent"],
        author=stored["author"],
        token_ids=tuple(stored["token_ids"]),
        turn=stored["turn"],
        kind=stored["kind"],
        logprobs=tuple(stored["behaviour_logprobs"]),
        finish_reason=stored["finish_reason"],
        text=stored["text"],
        spans={
            name: Span(tuple(span["outer"]), tuple(span["inner"]), span["text"])
            for name, span in json.loads(stored["spans"]).items()
        },
        hull=stored["hull"] and (stored["hull"][0], stored["hull"][1]),
        seed=stored["seed"],
        info=json.loads(stored["info"]),
    )


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

    def pad(lists: Any) -> Tensor | None:
        """`[B, T]` list values at the stored positions, 0 elsewhere; None if all are null."""
        if len(lists) and lists.null_count == len(lists):
            return None
        values = lists.flatten().to_numpy(zero_copy_only=False)
        padded = np.zeros(kept.shape, dtype=values.dtype)
        padded[kept] = values
        return torch.from_numpy(padded)

    scores = pa.Table.from_struct_array(_get_column_array(flat, "scores"))
    return TrainedRows(
        places=places,
        groups=torch.from_numpy(flat["group"].to_numpy().astype(np.int64)),
        own=torch.from_numpy(kept),
        tokens={name: pad(_get_column_array(flat, name)) for name in TOKEN_COLUMNS},
        scores={
            name: torch.from_numpy(scores[name].to_numpy().copy())
            for name in SCORE_COLUMNS
            if not scores[name].null_count
        },
    )


def _get_column_array(flat: pa.Table, name: str) -> Any:
    """A column as one contiguous array."""
    return flat[name].combine_chunks()


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


PROBE_SCHEMA = pa.schema(
    [
        ("answered", pa.int32()),
        ("problem_id", pa.string()),
        ("prompt", pa.string()),
        ("system", pa.string()),
        ("problem", pa.string()),
        ("stratum", pa.string()),
        ("scheme", pa.string()),
        ("point", pa.int32()),
        ("share", pa.float64()),
        ("reasoning_tokens", pa.int32()),
        ("seed", pa.int64()),
        # Tokens of the whole response; the first `given` were not sampled for this continuation.
        ("token_ids", pa.list_(pa.int32())),
        ("given", pa.int32()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("wrapped", pa.bool_()),
        ("rewards", ENTRIES),
        ("global_rewards", ENTRIES),
        ("correct", pa.bool_()),
        ("same", pa.bool_()),
        ("whole_text", pa.string()),
        ("whole_answer", pa.string()),
        ("whole_correct", pa.bool_()),
        ("confidences", pa.list_(pa.float64())),
    ]
)


def probe_table(probed: ProbeResult) -> pa.Table:
    """Builds a table of all samples of a probe; answers without samples are left out."""
    records = []
    for sample in probed.samples:
        answered = probed.answered[sample.answered]
        records.append(
            {
                "answered": sample.answered,
                "problem_id": answered.problem.id,
                "prompt": answered.problem.prompt,
                "system": answered.problem.system,
                "problem": json.dumps(dict(answered.problem.fields)),
                "stratum": answered.problem.stratum,
                "scheme": sample.scheme,
                "point": sample.point.number,
                "share": sample.point.share,
                "reasoning_tokens": sample.point.tokens,
                "seed": sample.seed,
                "token_ids": sample.response.token_ids,
                "given": sample.given,
                "text": sample.response.text,
                "finish_reason": sample.response.finish_reason,
                "wrapped": sample.wrapped,
                "rewards": encode_entries(sample.rewards),
                "global_rewards": encode_entries(sample.global_rewards),
                "correct": sample.correct,
                "same": sample.same,
                "whole_text": answered.text,
                "whole_answer": answered.answer,
                "whole_correct": answered.correct,
                "confidences": answered.confidences,
            }
        )
    return pa.Table.from_pylist(records, PROBE_SCHEMA)


def recorded_probes(registry: Registry, run_id: str) -> list[RecordedProbe]:
    """Reads all recorded probes of a run, one entry per scheme and step."""
    return [
        RecordedProbe(e.suite.removeprefix("probe/"), e.step, e.metrics)
        for e in registry.results.evaluations(run_id, "probe/")
    ]
