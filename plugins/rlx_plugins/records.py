"""Reads records with their locations from JSONL files, Parquet files and Hugging Face datasets."""

import gzip
import hashlib
import json
import math
import random
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlx.plugin import Split, expand_path

Row = tuple[str, Mapping[str, Any]]
"""A record's location, such as "train.jsonl line 3", and the record."""

Stamp = tuple[str, int, int]
"""Path, modification time in ns, and size of a file, which together identify its state."""

T = TypeVar("T")
_BATCH = 1024
_OTHER_FORMATS = (".csv", ".tsv", ".json", ".txt", ".xlsx", ".arrow")


class Source(BaseModel):
    """The source of a split's records: files, or a dataset of the Hugging Face hub."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | tuple[Path, ...] | None = None
    """A `.jsonl`, `.jsonl.gz` or `.parquet` file, or an ordered list of them."""
    hub: str | None = None
    """Name of a dataset, such as `openai/gsm8k`."""
    config: str | None = None
    """Configuration of the hub's dataset."""
    revision: str | None = None
    """Commit, tag or branch of the hub's dataset."""
    split: str | None = None
    """Split of the hub's dataset."""
    limit: int | None = Field(None, ge=1)
    """Read only the first `limit` records."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("needs either `path` or `hub`")
        if self.hub is not None and self.split is None:
            raise ValueError("`hub` needs a `split`, such as `split: train`")
        if self.hub is not None and Path(self.hub).is_dir():  # its cache would hold what it was
            raise ValueError(f"{self.hub} is a folder; `path` takes its files")
        if self.hub is None and any((self.config, self.revision, self.split)):
            raise ValueError("`config`, `revision` and `split` belong to `hub`")
        if not self.paths and self.hub is None:
            raise ValueError("`path` is an empty list")
        if other := next((p for p in self.paths if p.suffix in _OTHER_FORMATS), None):
            raise ValueError(f"{other}: its name must end in .jsonl, .jsonl.gz or .parquet")
        return self

    @property
    def name(self) -> str:
        """The files or the dataset, for messages."""
        return self.hub or ", ".join(map(str, self.paths))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, in order."""
        if self.path is None:
            return ()
        paths = self.path if isinstance(self.path, tuple) else (self.path,)
        return tuple(map(expand_path, paths))

    def stamps(self) -> tuple[Stamp, ...]:
        return tuple(map(_get_file_stamp, self.paths))

    def digests(self, split: str) -> dict[str, str]:
        """Returns digests of the records of each file, or of the hub's dataset, however they are
        written; their names begin with `split`."""
        if self.hub is not None:
            return {f"{split} {self.hub}": _digest_records(self, ())}
        paths = self.path if isinstance(self.path, tuple) else (self.path,)
        parts = [self.model_copy(update={"path": path}) for path in paths if path is not None]
        return {f"{split} {part.path}": _digest_records(part, part.stamps()) for part in parts}

    def rows(self) -> Iterator[Row]:
        """Reads the records in order; raises ValueError, with the place, for what is none."""
        return islice(self._read_all_rows(), self.limit)

    def parse_rows(self, parse: Callable[[Mapping[str, Any]], T]) -> Iterator[tuple[str, T]]:
        """Yields the place of each record and what is made of it; faults name the place."""
        for where, record in self.rows():
            try:
                yield where, parse(record)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None

    def _read_all_rows(self) -> Iterator[Row]:
        if self.hub is not None:
            yield from _load_hub_rows(self.hub, self.config, self.revision, str(self.split))
        for path in self.paths:
            if path.name.endswith((".jsonl", ".jsonl.gz")):
                yield from _read_json_lines(path)
            elif path.suffix == ".parquet":
                yield from _read_parquet_rows(path)
            else:
                raise ValueError(f"{path}: its name must end in .jsonl, .jsonl.gz or .parquet")


def _get_file_stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError as error:
        help_ = ""
        if not path.is_absolute() and not path.suffix and len(path.parts) == 2:
            help_ = f"; a dataset of the hub is named by `hub: {path}`"
        elif path.parent.is_dir():
            near = get_close_matches(path.name, [p.name for p in path.parent.iterdir()], 1)
            help_ = f"; did you mean {near[0]}?" if near else ""
        raise OSError(f"cannot read {path}: {error.strerror}{help_}") from None
    return str(path), stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=16)
def _digest_records(source: Source, _: tuple[Stamp, ...]) -> str:
    digest, count = hashlib.sha256(), 0
    for _where, record in source.rows():
        text = json.dumps(record, sort_keys=True, default=repr)  # columns may hold anything
        digest.update(text.encode() + b"\n")
        count += 1
    return f"{count} records with digest {digest.hexdigest()[:16]}"


def pick_problem(problems: Sequence[T], split: Split, index: int, purpose: str) -> T:
    """Problem number `index` of a split: those of training are shuffled by `purpose` in every pass,
    those of a test are in order."""
    passes, position = divmod(index, len(problems))
    if split == "train":
        position = _shuffle_positions(f"{purpose}/pass {passes}", len(problems))[position]
    return problems[position]


@lru_cache(maxsize=16)
def _shuffle_positions(purpose: str, size: int) -> list[int]:
    return random.Random(purpose).sample(range(size), size)


# Files -------------------------------------------------------------------------------------------


def _open_binary_file(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from None


def _read_json_lines(path: Path) -> Iterator[Row]:
    with _open_binary_file(path) as stream:
        packed = stream.peek(2)[:2] == b"\x1f\x8b"
        lines = gzip.GzipFile(fileobj=stream) if packed else stream
        try:
            for number, line in enumerate(lines, start=1):
                if line.removeprefix(BOM_UTF8).strip():
                    where = f"{path} line {number}"
                    yield where, _parse_json_object(line, where)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not readable as gzip: {error}") from None


def _parse_json_object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8") from None
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not a JSON object")
    return record


def _read_parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    with _open_binary_file(path) as stream:
        try:
            batches = ParquetFile(stream).iter_batches(batch_size=_BATCH)
            yield from _read_batch_rows(batches, str(path))
        except (ArrowException, OSError) as error:
            raise ValueError(f"{path}: not readable as Parquet: {error}") from None


def _read_batch_rows(batches: Iterable[Any], name: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for record in _widen_floats(batch).to_pylist():
            number += 1
            yield f"{name} row {number}", record


def _widen_floats(table: Any) -> Any:
    """An Arrow table whose float32 columns hold the shortest numbers: 0.1, not 0.10000000149."""
    import pyarrow as pa

    for at, field in enumerate(table.schema):
        if pa.types.is_float32(field.type):
            column = table.column(at).cast(pa.string()).cast(pa.float64())
            table = table.set_column(at, field.name, column)
    return table


# Hugging Face datasets ---------------------------------------------------------------------------


def _load_hub_rows(
    name: str, config: str | None, revision: str | None, split: str
) -> Iterator[Row]:
    where = f"{name} ({split})"
    try:
        library = import_module("datasets")
    except ImportError:
        raise ImportError(
            f"the dataset {name} needs the package `datasets`: pip install 'rlx[huggingface]'"
        ) from None
    library.disable_progress_bars()
    try:
        found = library.load_dataset(name, config, revision=revision, split=split)
    except OSError as error:  # a missing dataset, or a network error
        raise OSError(
            f"cannot read {where}: {error}. Without a network, it must already be in the cache: "
            "load it once on a machine with a network, or give its files with `path`"
        ) from None
    except (ValueError, library.exceptions.DatasetsError) as error:
        raise ValueError(f"{where}: {error}") from None
    yield from _read_batch_rows(found.with_format("arrow").iter(_BATCH), where)


# Values ------------------------------------------------------------------------------------------


def get_value_at_path(record: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a dotted path, such as `choices.0`; a key may contain dots itself.

    Raises ValueError with the nearest path that there is.
    """
    try:
        return _get_node_value(record, path)
    except LookupError:
        paths = list(_list_field_paths(record))
        near = get_close_matches(path, paths, 1)
        listed = ", ".join(map(repr, paths[:8])) + (", ..." if len(paths) > 8 else "")
        help_ = f"did you mean {near[0]!r}?" if near else f"there are {listed or 'no fields'}"
        raise ValueError(f"there is no {path!r}; {help_}") from None


def _get_node_value(node: Any, path: str) -> Any:
    if isinstance(node, Mapping) and path in node:
        return node[path]
    head, dot, rest = path.partition(".")
    if isinstance(node, list | tuple) and head.isdecimal():
        below = node[int(head)]
    elif isinstance(node, Mapping):
        below = node[head]
    else:
        raise LookupError(path)
    return _get_node_value(below, rest) if dot else below


def _list_field_paths(record: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in record.items():
        yield f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _list_field_paths(value, f"{before}{key}.")


def format_short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def convert_to_plain_json(value: Any) -> Any:
    """Returns a value as plain JSON: dates as ISO text, decimals as numbers if a float holds them.

    Raises ValueError for what JSON cannot represent: NaN, bytes, an image, a lone surrogate.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _check_surrogates(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"a key must be text, got {key!r}")
        return {_check_surrogates(key): convert_to_plain_json(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_plain_json(below) for below in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{value} is not a finite number")
        if value == value.to_integral_value():
            return int(value)
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    raise ValueError(f"a value of type {type(value).__name__} is not plain JSON")


def _check_surrogates(text: str) -> str:
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("a lone surrogate is not a character")
    return text
