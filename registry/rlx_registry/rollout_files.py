"""Rollout files ("bodies"): one Parquet file per step, identified by its SHA-256 digest.

A file has one record per tree. The annotations below are its schema, and so are the streams of
`rlx_registry.token_streams`: those per token are fields of `RowRecord`, before `scores`, and those
per row end `ScoreRecord`.
"""

import hashlib
import json
import os
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypedDict,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from rlx_registry.errors import BodyError
from rlx_registry.token_streams import STREAMS

if TYPE_CHECKING:
    import pyarrow

ROW_GROUP_BYTES = 2**21
"""Uncompressed bytes of a row group, the unit that a reader of one tree has to decode."""

INDEX_COLUMN = "index"
"""A column that files of earlier versions have beside those of `TreeRecord`."""

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
    masked_return_sum: Float32 | None


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

    `pieces` is the text of each token of each segment, for readers without a tokenizer; nothing is
    computed from it.
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
    pieces: list[list[str]] | None


def get_score_name(stored: str) -> str:
    """The name of a score, which files of earlier versions store under another."""
    return {"seed_returns_score": "masked_return_sum"}.get(stored, stored)


def get_model_text(tree: TreeRecord, segment: int) -> str:
    """What the model read or wrote in a segment, with all that a chat template adds; of a file
    without texts of tokens, the segment's own text."""
    pieces = tree.get("pieces")
    return "".join(pieces[segment]) if pieces else tree["segments"][segment]["text"]


def list_path_segments(tree: TreeRecord, segment: int) -> list[int]:
    """Segments from the root to `segment`, inclusive."""
    found = []
    while segment >= 0:
        found.append(segment)
        segment = tree["segments"][segment]["parent"]
    return found[::-1]


def get_token_values(row: RowRecord, name: str) -> Sequence[float | bool] | None:
    """The values of one stream of a row; None if the step has no such stream."""
    return cast("Mapping[str, Any]", row).get(name)


def check_tree_record(tree: TreeRecord) -> None:
    """Raises KeyError, TypeError or ValueError unless a tree can be walked: a file may come from
    elsewhere, and its digest with it."""
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
        streams = [
            get_token_values(row, stream.stored_name)
            for stream in STREAMS.values()
            if stream.shape != "[B]"
        ]
        if row["start"] < 0 or len({len(values) for values in streams if values}) > 1:
            raise ValueError(f"{where}: row {row['row']} has streams of different lengths")


def build_arrow_type(hint: Any) -> "pyarrow.DataType":
    """The Arrow type of a record or of one of its fields."""
    import pyarrow

    origin = get_origin(hint)
    if is_typeddict(hint):
        fields = [
            (name, build_arrow_type(field))
            for name, field in get_type_hints(hint, include_extras=True).items()
        ]
        at = len(fields) - (hint is RowRecord)  # the streams of a row come before its scores
        for stream in STREAMS.values():
            kind = pyarrow.type_for_alias(stream.dtype)
            if hint is ScoreRecord and stream.shape == "[B]":
                fields.append((stream.stored_name, kind))
            if hint is RowRecord and stream.shape != "[B]":
                fields.insert(at, (stream.stored_name, pyarrow.list_(kind)))
                at += 1
        return pyarrow.struct(fields)
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


def write_body(path: Path | str, table: "pyarrow.Table") -> tuple[str, int]:
    """Writes a table atomically, as Parquet with zstd compression; returns its SHA-256 and size in
    bytes."""
    from pyarrow import parquet

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w+b") as file:
            # Small row groups, because pages read few records. No dictionaries: the values of
            # tokens repeat too rarely for them to save time or space.
            records = max(1, table.num_rows * ROW_GROUP_BYTES // max(1, table.nbytes))
            options = {"compression": "zstd", "use_dictionary": False, "row_group_size": records}
            parquet.write_table(table, file, **options)
            file.flush()
            os.fsync(file.fileno())
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_to_disk(path.parent)  # a rename survives a power failure only once its folder is synced
    return digest, size


def read_body(path: Path | str, sha256: str | None = None) -> "pyarrow.Table":
    """Reads a table written by `write_body`; BodyError if it is not the one recorded, or not
    Parquet."""
    from pyarrow import parquet

    with _open_body(Path(path), sha256) as source:
        return parquet.ParquetFile(source).read()


def read_trees(path: Path | str, sha256: str | None, trees: Collection[int]) -> list[TreeRecord]:
    """Reads the records of some trees of a step's rollouts, or raises BodyError."""
    from pyarrow import parquet

    with _open_body(Path(path), sha256) as source:
        file, found = parquet.ParquetFile(source), list[TreeRecord]()
        for group in range(file.num_row_groups):
            numbers = file.read_row_group(group, columns=["tree"])["tree"].to_pylist()
            if at := [place for place, number in enumerate(numbers) if number in trees]:
                table = file.read_row_group(group)  # `take` of a list would import pandas
                found += [table.slice(place, 1).to_pylist()[0] for place in at]
        for tree in found:
            check_tree_record(tree)
            for row in tree["rows"]:
                row["scores"] = cast(
                    ScoreRecord, {get_score_name(k): v for k, v in row["scores"].items()}
                )
        return found


def search_body_trees(path: Path | str, sha256: str | None, text: str) -> set[int]:
    """Returns the trees of a step whose text below the prompt contains `text`, ignoring case."""
    from pyarrow import parquet

    wanted = text.casefold()
    with _open_body(Path(path), sha256) as source:
        file = parquet.ParquetFile(source)
        return {
            record["tree"]
            for record in file.read(columns=["tree", "segments.list.element.text"]).to_pylist()
            if any(wanted in (one["text"] or "").casefold() for one in record["segments"][1:])
        }


@contextmanager
def _open_body(path: Path, sha256: str | None) -> Iterator["pyarrow.BufferReader"]:
    """Checks the file's digest and yields its content, to be read as Parquet in the block."""
    import pyarrow

    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise BodyError(f"cannot read body {path.name}: not a regular file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BodyError(f"cannot read body {path.name}: {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise BodyError(f"body {path.name} was recorded as {sha256[:12]}… but is {found[:12]}…")
    try:
        yield pyarrow.BufferReader(content)
    except (pyarrow.ArrowException, KeyError, RecursionError, TypeError, ValueError) as error:
        raise BodyError(f"body {path.name} is damaged: {error}") from error


def sync_to_disk(path: Path) -> None:
    """Calls fsync on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
