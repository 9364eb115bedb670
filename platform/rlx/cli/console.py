"""The console of tables, pictures and progress bars. What it prints is untrusted.

Strings are text, never markup or emoji codes. Characters that a terminal obeys or hides are printed
as escapes, in strings before the layout is computed, and in all else as a last resort.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rlx.text import escape_lines

__all__ = ["open_console"]


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Returns the console of stdout or stderr. Styles are arguments or `rich.text.Text`.

    Args:
        stderr: print to stderr.
        quiet: print nothing.
    """
    return _PrintableConsole(stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False)


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
