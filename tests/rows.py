"""Tables of values: one test that goes through every row and names each one that is wrong."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

LONGEST_ID = 60  # characters of a row in a report


def each_row(
    names: str | Sequence[str],
    rows: Iterable[Any],
    *,
    ids: Sequence[str] | Callable[[Any], str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, with all rows in one test.

    A row that fails does not end the test: the report has the id and the assertion of every wrong
    row. Rows have their own `tmp_path`, what one sets by `monkeypatch` is undone before the next,
    and `capsys` holds nothing of the row before. Two tables on one function are crossed.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [_values(row, len(names)) for row in rows]
    labels = [_label(row, number, ids) for number, row in enumerate(table)]
    assert table, f"no rows for {', '.join(names)}"

    def wrap(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def check_rows(**fixtures: Any) -> None:
            wrong: list[str] = []
            first: BaseException | None = None
            for number, ((values, _), label) in enumerate(zip(table, labels, strict=True)):
                try:
                    with _fixtures_of_a_row(fixtures, number) as own:
                        check(**dict(zip(names, values, strict=True)), **own)
                except (Exception, pytest.fail.Exception) as error:
                    first = first or error
                    wrong.append(f"{label}: {type(error).__name__}: {error}")
            if wrong:
                said = "\n".join(wrong)
                raise AssertionError(f"{len(wrong)} of {len(table)} rows:\n{said}") from first

        signature = inspect.signature(check)
        kept = [p for name, p in signature.parameters.items() if name not in names]
        check_rows.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return check_rows

    return wrap


def _values(row: Any, count: int) -> tuple[tuple[Any, ...], str | None]:
    if isinstance(row, ParameterSet):
        assert not row.marks, "a row has no marks"
        return row.values, row.id if isinstance(row.id, str) else None
    return (row,) if count == 1 else tuple(row), None


def _label(row: tuple[tuple[Any, ...], str | None], number: int, ids: Any) -> str:
    values, name = row
    if name is None and callable(ids):
        name = "-".join(str(ids(value)) for value in values)
    elif name is None and ids is not None:
        name = ids[number]
    return str(name if name is not None else ", ".join(map(repr, values)))[:LONGEST_ID]


@contextlib.contextmanager
def _fixtures_of_a_row(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    own = dict(fixtures)
    if "capsys" in own:
        own["capsys"].readouterr()
    if "caplog" in own:
        own["caplog"].clear()
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / f"row{number}"
        own["tmp_path"].mkdir()
    with contextlib.ExitStack() as undone:
        if "monkeypatch" in own:
            own["monkeypatch"] = undone.enter_context(own["monkeypatch"].context())
        yield own
