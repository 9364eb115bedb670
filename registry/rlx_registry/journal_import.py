"""Restores runs from their journals, for instance after the registry was lost."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sqlalchemy import JSON, Column, Connection, func, insert, select, update
from sqlalchemy.exc import InternalError, OperationalError, SQLAlchemyError

from rlx_registry import models
from rlx_registry.changes import KINDS, SETTABLE, RunChange, apply_change, check_relative_path
from rlx_registry.column_values import AnyText
from rlx_registry.engine import advance_sequence
from rlx_registry.errors import BodyError, JournalError
from rlx_registry.index_rows import read_index_rows
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
SIGNS_OF_LIFE = frozenset(KINDS) - {"set", "grouped", "mirrored", "noted"}
MANY = 1000
"""Numbers per query."""
LARGEST = 10**9
"""Largest number of a run or a row: the columns have 32 bits on PostgreSQL, and room is left for
the numbers that follow."""

LATEST = 2.5e11
"""Largest time of a change, in seconds since the epoch: what a calendar can show."""


@dataclass(frozen=True, slots=True)
class JournalChange(RunChange):
    """A change with the number of its line, from 1."""

    line: int


@dataclass(frozen=True, slots=True)
class Journal:
    """The content of a run's journal.

    Attributes:
        run: the change that creates the run.
        changes: the other changes, in file order.
        left_out: descriptions of what could not be read.
    """

    run: JournalChange
    changes: tuple[JournalChange, ...]
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
        raise JournalError(f"{folder} has no journal to rebuild its registry record from")
    if not path.is_file():  # a pipe or a device may never end
        raise JournalError(f"{path} cannot be read: not a regular file")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error
    problems = []
    if path.name == UNFINISHED:
        problems.append(
            "changes made while the journal could not be written, for example on a full disk"
        )
    cut = lines.pop()
    if cut:
        problems.append(f"line {len(lines) + 1} is truncated")
    changes = []
    for number, line in enumerate(lines, 1):
        try:
            changes.append(_parse_change(line, number))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if not changes or changes[0].kind != "run":
        what = "; ".join(problems) or "it is empty"
        raise JournalError(f"{path} does not begin with a run: {what}")
    others = tuple(change for change in changes if change.kind != "run")
    return Journal(changes[0], others, tuple(problems))


def import_journal(
    connection: Connection, journal: Journal, folder: Path
) -> tuple[int, bool, tuple[str, ...]]:
    """Restores a run from its journal and sets its folder to `folder`.

    Returns:
        The run's number, whether it was created now, and a description of each line that the
        database refused. A run with the same digest, seed and time of submission is not created
        again.
    """
    run, c = journal.run, models.run.c
    same = select(c.id).where(c.digest == run.fields["digest"], c.seed == run.fields["seed"])
    found = connection.scalar(same.where(c.created == run.at))
    if found is not None:
        return int(found), False, ()
    key = _insert_run(connection, run)
    changes = list(_order_changes(connection, journal.changes))
    lasting = _find_lasting_rollouts(changes)
    refused = [
        problem
        for change in changes
        if _has_index(change) or change.line in lasting
        if (problem := _apply_journal_change(connection, key, change, folder))
    ]
    living = [change.at for change in journal.changes if change.kind in SIGNS_OF_LIFE]
    last = {"directory": str(folder), "heartbeat": max(living, default=run.at)}
    connection.execute(update(models.run).where(c.id == key).values(last))
    return key, True, tuple(refused)


def _parse_change(line: bytes, number: int) -> JournalChange:
    """Parses a line of a journal; raises ValueError with a description if it is invalid."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    change = _build_change(entry, number)
    if change is None:
        raise ValueError("is not a journal entry")
    if change.kind == "run":
        if change.fields.keys() != {"id", *SUBMITTED} or not _fits_run_columns(change.fields):
            raise ValueError("has other run fields than this version expects")
        if not _is_number(change.fields["id"]):
            raise ValueError("has a run without its number")
        return change
    if change.kind not in KINDS:
        raise ValueError(f"has the change {change.kind!r}, which this version does not know")
    if not _matches_signature(KINDS[change.kind], change):
        raise ValueError(f"has other fields of {change.kind!r} than this version expects")
    if change.kind in NUMBERED and not _is_number(change.fields.get(NUMBERED[change.kind])):
        raise ValueError(f"has the change {change.kind!r} without its number")
    if "path" in change.fields:
        check_relative_path(str(change.fields["path"]))
    return change


def _build_change(entry: object, line: int) -> JournalChange | None:
    """The change that a parsed line describes; None if it is not one."""
    if not isinstance(entry, dict) or not entry.keys() >= {"change", "at", "with"}:
        return None
    kind, at, fields = entry["change"], entry["at"], entry["with"]
    if not isinstance(kind, str) or not isinstance(fields, dict):
        return None
    if not _matches_type_hint(at, float) or not 0 <= at < LATEST:  # NaN is in no range
        return None
    return JournalChange(kind, float(at), fields, line)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _fits_run_columns(fields: Mapping[str, object]) -> bool:
    """Whether values have the types of the columns of a run."""
    columns = models.run.c
    return all(
        (value is None and columns[name].nullable)
        or _matches_type_hint(value, _find_json_type(columns[name]))
        for name, value in fields.items()
    )


def _find_json_type(column: "Column[Any]") -> type:
    """The type of a column's values in a journal."""
    if isinstance(column.type, AnyText):
        return str
    if isinstance(column.type, JSON):
        return list if column.name == "plugins" else dict
    return column.type.python_type


def _matches_signature(function: Callable[..., object], change: RunChange) -> bool:
    """Whether a change's fields fit the parameters and type hints of its function."""
    if change.kind == "set":
        known = bool(change.fields) and change.fields.keys() <= SETTABLE
        return known and _fits_run_columns(change.fields)
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
    if kind is Any:
        return True
    if kind is Mapping:
        return isinstance(value, dict) and all(
            _matches_type_hint(each, inner[1]) for each in value.values()
        )
    if kind is Sequence:
        return isinstance(value, list) and all(_matches_type_hint(e, inner[0]) for e in value)
    if kind is float:
        kind = int | float
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _find_lasting_rollouts(changes: Iterable[JournalChange]) -> set[int]:
    """Returns the lines of rollouts that were neither removed nor recorded again later."""
    lines: dict[object, int] = {}
    for change in changes:
        if change.kind == "rollouts_removed":
            lines.clear()
        elif change.kind == "rollouts":
            lines[change.fields["step"]] = change.line
    return set(lines.values())


def _fill_index(change: JournalChange, folder: Path) -> JournalChange:
    """Completes a change whose index is in the file of its step's rollouts.

    Raises:
        BodyError: the file is missing, is not the one recorded, or has no valid index.
    """
    if _has_index(change):
        return change
    path, sha256 = folder / str(change.fields["path"]), str(change.fields["sha256"])
    return replace(change, fields={**change.fields, "index": read_index_rows(path, sha256)})


def _has_index(change: JournalChange) -> bool:
    """Whether a change can be applied as it is in the journal."""
    return change.kind != "rollouts" or change.fields["index"] is not None


def _apply_journal_change(
    connection: Connection, key: int, change: JournalChange, folder: Path
) -> str | None:
    """Applies a change; returns why it is left out if it does not fit the tables."""
    try:
        with connection.begin_nested():
            apply_change(connection, key, _fill_index(change, folder))
    except BodyError as error:
        return f"line {change.line}: the rollouts of step {change.fields['step']}: {error}"
    except (OperationalError, InternalError):  # the database itself, not this line
        raise
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = str(error)
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error)
    else:
        return None
    first = reason.strip().split("\n")[0]
    return f"line {change.line}: its {change.kind!r} does not fit the registry: {first}"


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


def _order_changes(
    connection: Connection, changes: Sequence[JournalChange]
) -> Iterator[JournalChange]:
    """Yields changes in the order in which they were made, without duplicates.

    The lines of two concurrent processes may be in the wrong order in the file.
    """
    for kind, name in NUMBERED.items():
        column = COLUMNS.get(kind)
        numbers = {change.fields[name] for change in changes if change.kind == kind}
        up = 0 if column is None else _compute_number_shift(connection, column, sorted(numbers))
        changes = _sort_changes(changes, kind, name, up)
    yield from changes


def _sort_changes(
    changes: Sequence[JournalChange], kind: str, name: str, up: int
) -> list[JournalChange]:
    """Sorts the changes of one kind by number, and adds `up` to their numbers."""
    by_number = {c.fields[name]: c for c in reversed(changes) if c.kind == kind}
    ordered = iter([by_number[number] for number in sorted(by_number)])
    first = {id(change) for change in by_number.values()}
    return [
        _shift_change_number(next(ordered), name, up) if change.kind == kind else change
        for change in changes
        if change.kind != kind or id(change) in first
    ]


def _shift_change_number(change: JournalChange, name: str, up: int) -> JournalChange:
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
