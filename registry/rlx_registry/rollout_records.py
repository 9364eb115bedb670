"""The schema of rollout files: one record per tree, as writers, readers and the dashboard know it.

The annotations are the schema. A stream that is stored per token of a row is one line of
`RowRecord`, with the title under which tokens can be coloured by it.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "RewardRecord",
    "RowRecord",
    "ScoreRecord",
    "SegmentRecord",
    "TreeRecord",
    "build_arrow_type",
    "get_token_values",
    "token_streams",
]

Int32 = Annotated[int, "int32"]
Int64 = Annotated[int, "int64"]
Float32 = Annotated[float, "float32"]
Float64 = Annotated[float, "float64"]


@dataclass(frozen=True, slots=True)
class PerToken:
    """Marks a stream that is stored per token of a row.

    Attributes:
        title: what the dashboard calls it; "" if tokens are not coloured by it.
    """

    title: str = ""


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

    `global_rewards` are those of the rollout that ends here, null if none does.
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
    info: str
    rewards: list[RewardRecord]
    global_rewards: list[RewardRecord] | None
    dropped: bool


class ScoreRecord(TypedDict):
    """Scores of a row; `greedy_score` is the score of its prompt's greedy answer."""

    total_score: Float32 | None
    token_level_scores: Float32 | None
    seed_returns_score: Float32 | None
    greedy_score: Float32 | None


class RowRecord(TypedDict):
    """A trained row. Its streams start at token `start` of the row's sequence and cover its own
    tokens and those between them; null where the step has no such stream.

    `mc_values` is the value of the state in which the token's reasoning step begins.
    """

    row: Int32
    segment: Int32
    parent: Int32
    kind: str
    level: Int32
    group: Int32
    start: Int32
    mask: Annotated[list[bool] | None, PerToken()]
    weights: Annotated[list[Float32] | None, PerToken("weight")]
    advantages: Annotated[list[Float32] | None, PerToken("advantage")]
    old_logprobs: Annotated[list[Float32] | None, PerToken("log-probability, learner")]
    reference_logprobs: Annotated[list[Float32] | None, PerToken("log-probability, reference")]
    values: Annotated[list[Float32] | None, PerToken("value")]
    placed: Annotated[list[Float32] | None, PerToken("reward placed")]
    token_rewards: Annotated[list[Float32] | None, PerToken("token reward")]
    kl: Annotated[list[Float32] | None, PerToken("KL from reference")]
    returns: Annotated[list[Float32] | None, PerToken("return")]
    step_ids: Annotated[list[Int64] | None, PerToken()]
    mc_values: Annotated[list[Float32] | None, PerToken("Monte-Carlo value")]
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


@cache
def token_streams() -> Mapping[str, PerToken]:
    """The streams that are stored per token of a row, by name."""
    found = {}
    for name, hint in get_type_hints(RowRecord, include_extras=True).items():
        marks = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, PerToken)]
        if marks:
            found[name] = marks[0]
    return types.MappingProxyType(found)


def get_token_values(row: RowRecord, name: str) -> Sequence[float | bool] | None:
    """The values of one stream of a row; None if the step has no such stream."""
    return cast("Mapping[str, Any]", row).get(name)


def build_arrow_type(hint: Any) -> "pyarrow.DataType":
    """The Arrow type of a record or of one of its fields; optional records' fields are left out."""
    import pyarrow

    origin = get_origin(hint)
    if is_typeddict(hint):
        fields = get_type_hints(hint, include_extras=True)
        return pyarrow.struct(
            [
                (name, build_arrow_type(field))
                for name, field in fields.items()
                if get_origin(field) is not NotRequired
            ]
        )
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
