"""Reads Countdown problems from files or from the Hugging Face hub, and splits them."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from rlx.plugin import Split
from rlx_plugins.countdown.rewards import is_finite_number
from rlx_plugins.records import Source, Stamp

CountdownRecord = tuple[tuple[int, ...], float]
"""The numbers of a problem, and its target."""

_Placed = tuple[str, CountdownRecord]
"""A record's location, such as "train.parquet row 3", and the record."""


def _wrap_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str | Path) else value


_Problems = Annotated[Source, BeforeValidator(_wrap_path, json_schema_input_type=Path | Source)]


class CountdownFiles(BaseModel):
    """Records with `nums` (or `numbers`), a list of whole numbers, and `target`, a number.

    A source is the path of a `.jsonl` or `.parquet` file, or a mapping with `path` or `hub` as in
    the task `dataset`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: _Problems
    test: _Problems | None = None
    """Without it, the task's `held_out` splits off the problems for testing."""


@dataclass(frozen=True, slots=True)
class FileProblems:
    """The problems of both splits, and the largest of their numbers and targets."""

    train: tuple[CountdownRecord, ...]
    test: tuple[CountdownRecord, ...]
    largest: int

    def get_split(self, split: Split) -> tuple[CountdownRecord, ...]:
        """Returns the problems of one split."""
        return self.train if split == "train" else self.test


def is_held_out(numbers: Sequence[int], target: float, one_in: int) -> bool:
    """Whether a problem belongs to the test split, independent of the order of its numbers."""
    key = repr((tuple(sorted(numbers)), target))
    return zlib.crc32(key.encode()) % one_in == 0


def read_files(files: CountdownFiles, held_out: int) -> FileProblems:
    """Reads both splits, once per process and state of the files.

    Args:
        files: the sources.
        held_out: without a test source, one in `held_out` problems is for testing.

    Raises:
        OSError, ImportError: this machine lacks a file, a dataset or a package.
        ValueError: a record is malformed, a split has no problem, or a test problem is also in the
            training source; the message names the file and the line or row.
    """
    stamps = files.train.stamps() + (files.test.stamps() if files.test else ())
    return _load_problems(files, held_out, stamps)


@lru_cache(maxsize=4)
def _load_problems(files: CountdownFiles, held_out: int, stamps: tuple[Stamp, ...]) -> FileProblems:
    if files.test is None:
        train, test = _split_problems(files.train, held_out)
    else:
        train, test = _read_source(files.train), _read_source(files.test)
        _check_splits(train, test)
    values = (n for _, (numbers, target) in (*train, *test) for n in (*numbers, target))
    return FileProblems(
        tuple(record for _, record in train),
        tuple(record for _, record in test),
        int(max(values)),
    )


def _split_problems(source: Source, held_out: int) -> tuple[list[_Placed], list[_Placed]]:
    train: list[_Placed] = []
    test: list[_Placed] = []
    for where, record in _read_source(source):
        (test if is_held_out(*record, held_out) else train).append((where, record))
    for split, placed in (("train", train), ("test", test)):
        if not placed:
            raise ValueError(
                f"{_get_source_name(source)}: no problem is left for the split {split!r} with "
                f"held_out: {held_out}"
            )
    return train, test


def _read_source(source: Source) -> list[_Placed]:
    placed = list(_parse_rows(source))
    if not placed:
        raise ValueError(f"{_get_source_name(source)}: has no problems")
    return placed


def _check_splits(train: list[_Placed], test: list[_Placed]) -> None:
    known = {_build_record_key(record): where for where, record in train}
    for where, record in test:
        if (first := known.get(_build_record_key(record))) is not None:
            raise ValueError(f"{where}: also in the training problems, at {first}")


def _build_record_key(record: CountdownRecord) -> tuple[tuple[int, ...], float]:
    return tuple(sorted(record[0])), record[1]


def _get_source_name(source: Source) -> str:
    return source.hub or ", ".join(map(str, source.paths))


def _parse_rows(source: Source) -> Iterator[_Placed]:
    for where, record in source.rows():
        try:
            yield where, _parse_record(record)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _parse_record(record: Mapping[str, Any]) -> CountdownRecord:
    """Checks one record.

    Raises:
        ValueError: a field is missing or malformed; the message names it.
    """
    name = "numbers" if "numbers" in record else "nums"
    for field, synonym in ((name, " (or numbers)"), ("target", "")):
        if field not in record:
            there = ", ".join(map(repr, record)) or "no fields"
            raise ValueError(f"there is no field {field}{synonym}; there are {there}")
    numbers, target = record[name], record["target"]
    if not isinstance(numbers, list) or not numbers or not all(map(_is_natural, numbers)):
        raise ValueError(
            f"{name} must be a list of whole numbers, none below 0, got {_shorten(numbers)}"
        )
    if not is_finite_number(target):
        raise ValueError(f"target must be a finite number, got {_shorten(target)}")
    return tuple(map(int, numbers)), int(target) if target == int(target) else target


def _is_natural(value: Any) -> bool:
    return is_finite_number(value) and value >= 0 and value == int(value)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
