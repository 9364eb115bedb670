"""Restores runs from their journals, for instance after the registry was lost."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sqlalchemy import Column, Connection, func, insert, select, update
from sqlalchemy.exc import CompileError

from rlx_registry import models
from rlx_registry.changes import KINDS, RunChange, apply_change, check_relative_path
from rlx_registry.engine import advance_sequence
from rlx_registry.errors import JournalError
from rlx_registry.journal import NAME, UNFINISHED
from rlx_registry.snapshot import SUBMITTED

__all__ = ["Journal", "find_journal", "import_journal", "read_journal"]

NUMBERED = {"moved": "id", "event": "id", "artifact": "seq", "metrics": "seq"}
"""Kinds of change with an increasing number, and the field that holds it."""
COLUMNS: Mapping[str, "Column[int]"] = {
    "moved": models.status_change.c.id,
    "event": models.event.c.id,
    "artifact": models.artifact.c.seq,
}
"""Columns whose numbers are unique over all runs of a registry."""
SIGNS_OF_LIFE = frozenset(KINDS) - {"set", "grouped", "mirrored"}
MANY = 1000
"""Numbers per query."""


@dataclass(frozen=True, slots=True)
class Journal:
    """The content of a run's journal.

    Attributes:
        run: the change that creates the run.
        changes: the other changes, in file order.
        left_out: descriptions of what could not be read.
    """

    run: RunChange
    changes: tuple[RunChange, ...]
    left_out: tuple[str, ...]


def find_journal(folder: Path) -> Path | None:
    """Returns a run folder's journal, else the incomplete one, else None."""
    files = (folder / NAME, folder / UNFINISHED)
    return next((file for file in files if file.exists()), None)


def read_journal(folder: Path) -> Journal:
    """Reads the journal of a run's folder.

    Raises:
        JournalError: there is no journal, or it does not begin with a run.
    """
    path = find_journal(folder)
    if path is None:
        raise JournalError(f"{folder} has no journal: nothing tells what the registry knew of it")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error
    problems = []
    if path.name == UNFINISHED:
        problems.append(
            "what was written once the journal could not be, on a full disk for instance"
        )
    cut = lines.pop()
    if cut:
        problems.append(f"line {len(lines) + 1} is cut short")
    changes = []
    for number, line in enumerate(lines, 1):
        try:
            changes.append(_parse_change(line))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if not changes or changes[0].kind != "run":
        what = "; ".join(problems) or "it is empty"
        raise JournalError(f"{path} does not begin with a run: {what}")
    others = tuple(change for change in changes if change.kind != "run")
    return Journal(changes[0], others, tuple(problems))


def import_journal(connection: Connection, journal: Journal, folder: Path) -> tuple[int, bool]:
    """Restores a run from its journal and sets its folder to `folder`.

    Returns:
        The run's number, and whether it was created now; a run with the same digest, seed and
        time of submission is not created again.
    """
    run, c = journal.run, models.run.c
    same = select(c.id).where(c.digest == run.fields["digest"], c.seed == run.fields["seed"])
    found = connection.scalar(same.where(c.created == run.at))
    if found is not None:
        return int(found), False
    key = _insert_run(connection, run)
    for change in _order_changes(connection, journal.changes):
        _apply_journal_change(connection, key, change)
    living = [change.at for change in journal.changes if change.kind in SIGNS_OF_LIFE]
    last = {"directory": str(folder), "heartbeat": max(living, default=run.at)}
    connection.execute(update(models.run).where(c.id == key).values(last))
    return key, True


def _parse_change(line: bytes) -> RunChange:
    """Parses a line of a journal; raises ValueError with a description if it is invalid."""
    try:
        entry = json.loads(line)
        change = RunChange(entry["change"], float(entry["at"]), dict(entry["with"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError("is not a line of a journal") from None
    if change.kind == "run":
        if change.fields.keys() != {"id", *SUBMITTED}:
            raise ValueError("tells of a run otherwise than this version does")
        return change
    if change.kind not in KINDS:
        raise ValueError(f"tells of {change.kind!r}, which this version does not know")
    if not _matches_signature(KINDS[change.kind], change):
        raise ValueError(f"tells of {change.kind!r} otherwise than this version does")
    if change.kind in NUMBERED and not isinstance(change.fields.get(NUMBERED[change.kind]), int):
        raise ValueError(f"tells of {change.kind!r} without its number")
    if "path" in change.fields:
        check_relative_path(str(change.fields["path"]))
    return change


def _matches_signature(function: Callable[..., object], change: RunChange) -> bool:
    """Whether a change's fields fit the parameters and type hints of its function."""
    try:
        bound = signature(function).bind(None, 0, change.at, **change.fields)
    except TypeError:
        return False
    hints = get_type_hints(function)
    return all(
        _matches_type_hint(value, hints[name])
        for name, value in bound.arguments.items()
        if name in change.fields
    )


def _matches_type_hint(value: object, hint: Any) -> bool:
    """Whether a JSON value has a type; checks the values of typed mappings too."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        return any(_matches_type_hint(value, each) for each in inner)
    if kind is Mapping and isinstance(value, dict):
        return inner[1] is Any or all(_matches_type_hint(each, inner[1]) for each in value.values())
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind)


def _apply_journal_change(connection: Connection, key: int, change: RunChange) -> None:
    try:
        apply_change(connection, key, change)
    except (AttributeError, CompileError, KeyError, TypeError, ValueError) as error:
        raise JournalError(f"a {change.kind!r} of the journal is not one: {error}") from error


def _insert_run(connection: Connection, run: RunChange) -> int:
    """Inserts a run under its own number if that is free, else under the next number."""
    c, wanted = models.run.c, int(run.fields["id"])
    fields = {name: run.fields[name] for name in SUBMITTED}
    # A placeholder: the journal's first "moved" change sets the status.
    row = {**fields, "status": "submitted", "created": run.at}
    if connection.scalar(select(c.id).where(c.id == wanted)) is None:
        row["id"] = wanted
        advance_sequence(connection, c.id, wanted)
    statement = insert(models.run).returning(c.id)
    return int(connection.execute(statement, row).scalar_one())


def _order_changes(connection: Connection, changes: Sequence[RunChange]) -> Iterator[RunChange]:
    """Yields changes in the order in which they were made, without duplicates.

    The lines of two concurrent processes may be in the wrong order in the file.
    """
    for kind, name in NUMBERED.items():
        column = COLUMNS.get(kind)
        numbers = {change.fields[name] for change in changes if change.kind == kind}
        up = 0 if column is None else _compute_number_shift(connection, column, sorted(numbers))
        changes = _sort_changes(changes, kind, name, up)
    yield from changes


def _sort_changes(changes: Sequence[RunChange], kind: str, name: str, up: int) -> list[RunChange]:
    """Sorts the changes of one kind by number, and adds `up` to their numbers."""
    by_number = {c.fields[name]: c for c in reversed(changes) if c.kind == kind}
    ordered = iter([by_number[number] for number in sorted(by_number)])
    first = {id(change) for change in by_number.values()}
    return [
        _shift_change_number(next(ordered), name, up) if change.kind == kind else change
        for change in changes
        if change.kind != kind or id(change) in first
    ]


def _shift_change_number(change: RunChange, name: str, up: int) -> RunChange:
    return replace(change, fields={**change.fields, name: change.fields[name] + up})


def _compute_number_shift(
    connection: Connection, column: "Column[int]", wanted: Sequence[int]
) -> int:
    """Returns the offset that moves all numbers to free ones.

    Also advances the column's sequence past the shifted numbers.
    """
    if not wanted:
        return 0
    chunks = (wanted[i : i + MANY] for i in range(0, len(wanted), MANY))
    taken = any(
        connection.scalar(select(column).where(column.in_(chunk)).limit(1)) is not None
        for chunk in chunks
    )
    up = int(connection.scalar(select(func.max(column))) or 0) if taken else 0
    advance_sequence(connection, column, wanted[-1] + up)
    return up
