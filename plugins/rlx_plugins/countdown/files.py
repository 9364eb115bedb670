"""Reads Countdown problems from files or from the Hugging Face hub, and splits them."""

import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from rlx_plugins.countdown.rewards import is_finite_number
from rlx_plugins.records import Source, Stamp, format_short_repr

CountdownRecord = tuple[tuple[int, ...], float]
"""The numbers of a problem, and its target."""


class CountdownFiles(BaseModel):
    """Records with `nums` (or `numbers`), a list of whole numbers, and `target`, a number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: Source
    """As in the task `dataset`; `held_out` splits off the problems for testing."""


class FileProblems(NamedTuple):
    train: tuple[CountdownRecord, ...]
    test: tuple[CountdownRecord, ...]
    largest: int
    """The largest number or target."""


def is_held_out(numbers: Sequence[int], target: float, one_in: int) -> bool:
    """Whether a problem belongs to the test split, in whatever order its numbers are."""
    key = repr((tuple(sorted(numbers)), target))
    return zlib.crc32(key.encode()) % one_in == 0


@lru_cache(maxsize=4)
def load_problems(source: Source, held_out: int, stamps: tuple[Stamp, ...]) -> FileProblems:
    """Reads both splits, once per process and state of the files."""
    train: list[CountdownRecord] = []
    test: list[CountdownRecord] = []
    for _, record in source.parse_rows(_parse_record):
        (test if is_held_out(*record, held_out) else train).append(record)
    for split, problems in (("train", train), ("test", test)):
        if not problems:
            raise ValueError(
                f"{source.name}: no problem is left for the split {split!r} with "
                f"held_out: {held_out}"
            )
    largest = max(n for numbers, target in (*train, *test) for n in (*numbers, target))
    return FileProblems(tuple(train), tuple(test), int(largest))


def _parse_record(record: Mapping[str, Any]) -> CountdownRecord:
    name = "numbers" if "numbers" in record else "nums"
    for field, synonym in ((name, " (or numbers)"), ("target", "")):
        if field not in record:
            there = ", ".join(map(repr, record)) or "no fields"
            raise ValueError(f"there is no field {field}{synonym}; there are {there}")
    numbers, target = record[name], record["target"]
    if not isinstance(numbers, list) or not numbers or not all(map(_is_natural, numbers)):
        raise ValueError(
            f"{name} must be a list of whole numbers, none below 0, "
            f"got {format_short_repr(numbers)}"
        )
    if not is_finite_number(target):
        raise ValueError(f"target must be a finite number, got {format_short_repr(target)}")
    return tuple(map(int, numbers)), int(target) if target == int(target) else target


def _is_natural(value: Any) -> bool:
    return is_finite_number(value) and value >= 0 and value == int(value)
