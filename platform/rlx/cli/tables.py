"""Tables of text and numbers."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Column, Table

from rlx.cli.console import open_console


def build_table(
    *heads: str | Column,
    rows: Iterable[Sequence[RenderableType]] = (),
    title: str | None = None,
    is_text: bool = False,
) -> Table:
    """A table without edges. Cells that do not fit are wrapped, never cut. The first column is to
    the left, and all others, of numbers, to the right, unless a `rich.table.Column` says otherwise.
    With `is_text` each is to the left, without a line below the headings. Headings that are all
    empty are not shown."""
    left = len(heads) if is_text else 1
    columns = [
        head if isinstance(head, Column) else Column(head, justify="right" if n >= left else "left")
        for n, head in enumerate(heads)
    ]
    for column in columns:
        column.overflow = "fold"
    table = Table(
        *columns,
        title=title,
        title_justify="left",
        title_style="bold",
        box=None if is_text else box.SIMPLE,
        show_edge=False,
        show_header=any(column.header for column in columns),
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for row in rows:
        table.add_row(*row)
    return table


def print_table(*heads: str | Column, rows: Iterable[Sequence[RenderableType]]) -> None:
    """Prints a table of text to stdout."""
    open_console().print(build_table(*heads, rows=rows, is_text=True))
