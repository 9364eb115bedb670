"""The schema of rollout files: one record per tree, as writers, readers and the dashboard know it.

The annotations are the schema, and so are the streams of `rlx_registry.token_streams`: those per
token are fields of `RowRecord`, before `scores`, and those per row end `ScoreRecord`.
"""

import json
import types
from collections.abc import Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypedDict,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from rlx_registry.token_streams import STREAMS

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "RewardRecord",
    "RowRecord",
    "ScoreRecord",
    "SegmentRecord",
    "TreeRecord",
    "build_arrow_type",
    "check_tree_record",
    "get_token_values",
]

Int32 = Annotated[int, "int32"]
Int64 = Annotated[int, "int64"]
Float32 = Annotated[float, "float32"]
Float64 = Annotated[float, "float64"]


class RewardRecord(TypedDict):
    """One named reward; `parts` is JSON."""

    name: str
    raw: Float64 | None
    weight: Float64
    status: Literal["scored", "absent", "replaced"]
    reason: str | None
    parts: str


class SegmentRecord(TypedDict):
    """A prompt, a turn or an observation of a tree; `spans` and `info` are JSON.

    `global_rewards` are those of the rollout that ends here, null if none does. `sampled_after` is
    null; earlier versions stored the step whose weights sampled each token.
    """

    parent: Int32
    author: str
    turn: Int32
    kind: str
    token_ids: list[Int32]
    behaviour_logprobs: list[Float32]
    finish_reason: str
    text: str
    spans: str
    hull: list[Int32] | None
    seed: Int64 | None
    sampled_after: list[Int32] | None
    info: str
    rewards: list[RewardRecord]
    global_rewards: list[RewardRecord] | None
    dropped: bool


class ScoreRecord(TypedDict):
    """Scores of a row, and its values of the streams of shape [B]."""

    total_score: Float32 | None
    token_level_scores: Float32 | None
    seed_returns_score: Float32 | None


class RowRecord(TypedDict):
    """A trained row. `get_token_values` reads its streams, which start at token `start` of the
    row's sequence and cover its own tokens and those between them.
    """

    row: Int32
    segment: Int32
    parent: Int32
    kind: str
    level: Int32
    group: Int32
    start: Int32
    scores: ScoreRecord


class TreeRecord(TypedDict):
    """A tree as sampled and scored, and its rows as trained; `problem` is JSON.

    `pieces` is the text of each token of each segment, for readers without a tokenizer.
    """

    tree: Int32
    role: Literal["trained", "filtered", "greedy"]
    problem_id: str
    prompt: str
    system: str
    problem: str
    stratum: str
    segments: list[SegmentRecord]
    rows: list[RowRecord]
    pieces: NotRequired[list[list[str]]]


def get_token_values(row: RowRecord, name: str) -> Sequence[float | bool] | None:
    """The values of one stream of a row; None if the step has no such stream."""
    return cast("Mapping[str, Any]", row).get(name)


def check_tree_record(tree: TreeRecord) -> None:
    """Checks that a tree can be walked: a file may come from elsewhere, and its digest with it.

    Raises:
        KeyError, TypeError: a field is missing, or null where it must not be.
        ValueError: a parent does not come before its child, a row names a segment that is not
            there, tokens and their texts or values differ in number, or JSON is invalid.
    """
    where, segments = f"tree {tree['tree']}", tree["segments"]
    pieces: Sequence[Sequence[object]] = tree.get("pieces") or [s["token_ids"] for s in segments]
    if len(pieces) != len(segments):
        raise ValueError(f"{where} has texts of {len(pieces)} segments, not of {len(segments)}")
    for number, (segment, texts) in enumerate(zip(segments, pieces, strict=True)):
        if not -1 <= segment["parent"] < number:
            raise ValueError(f"{where}: segment {number} has the parent {segment['parent']}")
        if len(texts) != len(segment["token_ids"]):
            raise ValueError(f"{where}: segment {number} lacks the text of a token")
        for reward in (*segment["rewards"], *(segment["global_rewards"] or ())):
            if not isinstance(json.loads(reward["parts"] or "{}"), dict):
                raise ValueError(
                    f"{where}: segment {number} has a reward whose parts are no object"
                )
    for row in tree["rows"]:
        if not 0 <= row["segment"] < len(segments):
            raise ValueError(f"{where}: row {row['row']} names segment {row['segment']}")
        streams = (get_token_values(row, name) for name in _list_row_streams())
        if row["start"] < 0 or len({len(values) for values in streams if values}) > 1:
            raise ValueError(f"{where}: row {row['row']} has streams of different lengths")


def _list_row_streams() -> list[str]:
    """Stored names of the streams that have a value per token."""
    return [s.stored_name for s in STREAMS.values() if s.is_stored and s.shape != "[B]"]


def build_arrow_type(hint: Any) -> "pyarrow.DataType":
    """The Arrow type of a record or of one of its fields; optional records' fields are left out."""
    import pyarrow

    origin = get_origin(hint)
    if is_typeddict(hint):
        fields = [
            (name, build_arrow_type(field))
            for name, field in get_type_hints(hint, include_extras=True).items()
            if get_origin(field) is not NotRequired
        ]
        at = len(fields) - (hint is RowRecord)  # the streams of a row come before its scores
        return pyarrow.struct([*fields[:at], *_list_stream_fields(hint), *fields[at:]])
    if origin is Annotated:
        inner, mark = get_args(hint)[:2]
        return pyarrow.type_for_alias(mark) if isinstance(mark, str) else build_arrow_type(inner)
    if origin in (Union, types.UnionType):
        (known,) = [one for one in get_args(hint) if one is not type(None)]
        return build_arrow_type(known)
    if origin is list:
        return pyarrow.list_(build_arrow_type(get_args(hint)[0]))
    kind = type(get_args(hint)[0]) if origin is Literal else hint
    return pyarrow.type_for_alias({str: "string", bool: "bool"}[kind])


def _list_stream_fields(hint: Any) -> "list[tuple[str, pyarrow.DataType]]":
    """The streams that are fields of a record, in the order of their table."""
    import pyarrow

    stored = [stream for stream in STREAMS.values() if stream.is_stored]
    types = {stream.stored_name: pyarrow.type_for_alias(stream.dtype) for stream in stored}
    per_row = {stream.stored_name for stream in stored if stream.shape == "[B]"}
    if hint is ScoreRecord:
        return [(name, types[name]) for name in types if name in per_row]
    if hint is RowRecord:
        return [(name, pyarrow.list_(types[name])) for name in types if name not in per_row]
    return []
