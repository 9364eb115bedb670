"""The console of tables, pictures and progress bars. What it prints is untrusted.

Strings are text, never markup or emoji codes. Characters that a terminal obeys or hides are printed
as escapes, in strings before the layout is computed, and in all else as a last resort.
"""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import PaddingDimensions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlx.text import escape_lines

__all__ = ["build_table", "open_console"]


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Returns the console of stdout or stderr. Styles are arguments or `rich.text.Text`.

    Args:
        stderr: print to stderr.
        quiet: print nothing.
    """
    return _PrintableConsole(stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False)


def build_table(
    *heads: str,
    title: str | None = None,
    padding: PaddingDimensions = (0, 1, 0, 0),
) -> Table:
    """Returns a table without edges: its first column to the left, all others to the right.

    Args:
        heads: headings of the columns.
        title: printed bold above the table.
        padding: cells around a cell, as `rich.table.Table` takes them.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        padding=padding,
    )
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    return table


class _PrintableConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_lines(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=escape_lines(segment.text))
