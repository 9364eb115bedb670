"""The console of tables, pictures and progress bars. What it prints is untrusted: strings are text,
never markup, and characters that a terminal obeys or hides are printed as escapes."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlx.text import escape_lines

UNLIMITED_WIDTH = 100_000
"""Width of a console that is not a terminal: any table fits."""


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """The console of stdout or stderr, as wide as COLUMNS says, or else as its terminal. A pipe or
    a file has no width: lines are as long as their content, so that `grep` finds it."""
    console = _PrintableConsole(
        stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False
    )
    if not (console.is_terminal or os.environ.get("COLUMNS")):
        console.width = UNLIMITED_WIDTH
    return console


class _PrintableConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_lines(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        segments = super().render(renderable, options)
        for segment in _strip_lines(segments) if isinstance(renderable, Table) else segments:
            yield segment if segment.control else segment._replace(text=escape_lines(segment.text))


def _strip_lines(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Removes the blanks with which a table fills its last column."""
    for line in Segment.split_lines(segments):
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
        yield from (*line, Segment.line())
