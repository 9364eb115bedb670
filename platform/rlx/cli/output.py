"""The only way of plain text to the terminal: what a terminal obeys or hides is escaped.

Tables, pictures and progress bars go through `rlx.cli.output`.
"""

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
from click.shell_completion import CompletionItem
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import PaddingDimensions
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from rlx.errors import RlxError
from rlx.text import escape_lines

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

    from rlx.spec.reading import Diagnostic

_STYLES = (
    (re.compile(r"^error:", re.M), {"fg": "red", "bold": True}),
    (re.compile(r"^warning:", re.M), {"fg": "yellow", "bold": True}),
    (re.compile(r"^  -->|^ +[0-9]* \|(?= |$)", re.M), {"fg": "blue", "bold": True}),
    (re.compile(r"(?<=\| )\s*\^+$", re.M), {"fg": "red", "bold": True}),
    (re.compile(r"(?<= = )(?:help|note):", re.M), {"bold": True}),
)


def color_report(text: str, stream: TextIO) -> str:
    """Colors a rendered report if `stream` is a terminal and NO_COLOR is unset."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    for pattern, style in _STYLES:
        text = pattern.sub(lambda m, style=style: click.style(m[0], **style), text)  # type: ignore[misc]
    return text


def format_json(value: Any, *, indent: int | None = None, allow_nan: bool = True) -> str:
    """Returns a value as JSON of printable ASCII."""
    text = json.dumps(value, indent=indent, allow_nan=allow_nan)
    return text.replace("\x7f", "\\u007f")  # json.dumps does not escape DEL


def print_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints one line or several, escaped, to stdout, or with `err` to stderr."""
    click.echo(escape_lines(text), err=err, nl=nl)


def print_json(value: Any, *, allow_nan: bool = True) -> None:
    """Prints a value as indented JSON of printable ASCII."""
    print_text(format_json(value, indent=2, allow_nan=allow_nan))


def print_report(text: str) -> None:
    """Prints a report of errors or warnings to stderr, escaped, and colored on a terminal."""
    click.echo(color_report(escape_lines(text), sys.stderr), err=True)


def print_warnings(warnings: "Iterable[Diagnostic]") -> None:
    """Prints warnings to stderr."""
    from rlx.spec.reading import format_diagnostic

    for warning in warnings:
        print_report(format_diagnostic(warning))


UNLIMITED_WIDTH = 100_000


"""Width of a console that is not a terminal: any table fits."""


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Returns the console of stdout or stderr. Styles are arguments or `rich.text.Text`."""
    console = _PrintableConsole(
        stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False
    )
    if not (console.is_terminal or os.environ.get("COLUMNS")):
        console.width = UNLIMITED_WIDTH
    return console


def build_table(
    *heads: str | Column,
    rows: Iterable[Sequence[RenderableType]] = (),
    title: str | None = None,
    padding: PaddingDimensions = (0, 1, 0, 0),
    is_text: bool = False,
) -> Table:
    """Returns a table without edges. Cells that do not fit are wrapped, never cut.

    Args:
        heads: headings of the columns; none is shown if all are empty. The first column is to the
            left, and all others, of numbers, to the right; a `rich.table.Column` decides itself.
        rows: the cells of every row.
        title: printed bold above the table.
        padding: cells around a cell, as `rich.table.Table` takes them.
        is_text: each column is to the left, two blanks apart, without a line below the headings.
    """
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
        padding=(0, 2, 0, 0) if is_text else padding,
    )
    for row in rows:
        table.add_row(*row)
    return table


def print_table(*heads: str | Column, rows: Iterable[Sequence[RenderableType]]) -> None:
    """Prints a table of text to stdout; see `build_table`."""
    open_console().print(build_table(*heads, rows=rows, is_text=True))


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


DELIVER_AFTER = 0.05


"""Seconds until an ignored interrupt comes again, outside of the code that cannot raise it."""


@contextmanager
def watch_interrupts() -> Iterator[list[int]]:
    """Yields a list that gets an entry per interrupt, and loses none during the block.

    Compiled code such as Pydantic's may turn an interrupt into another error: the list says so.
    What is raised in `__del__` and in callbacks of weak references, which each import has, Python
    ignores: it is delivered again. SQLAlchemy logs the traceback of one that comes while it closes
    a connection: it is left out of logging's last resort.
    """
    came, timers, hook = list[int](), list[Timer](), sys.unraisablehook

    def record(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    def deliver_again(ignored: "UnraisableHookArgs") -> None:
        if ignored.exc_type is not KeyboardInterrupt:
            hook(ignored)
            return
        main = main_thread().ident
        timers.append(Timer(DELIVER_AFTER, signal.pthread_kill, (main, signal.SIGINT)))
        timers[-1].daemon = True
        timers[-1].start()

    def is_no_interrupt(entry: logging.LogRecord) -> bool:
        return not (entry.exc_info and isinstance(entry.exc_info[1], KeyboardInterrupt))

    handler, before = logging.lastResort, signal.getsignal(signal.SIGINT)
    is_ours = before is signal.default_int_handler and current_thread() is main_thread()
    sys.unraisablehook = deliver_again
    if is_ours:
        signal.signal(signal.SIGINT, record)
    if handler is not None:
        handler.addFilter(is_no_interrupt)
    try:
        yield came
    finally:
        if handler is not None:
            handler.removeFilter(is_no_interrupt)
        if is_ours:
            signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
        for timer in timers:
            timer.cancel()


Command = TypeVar("Command", bound=Callable[..., Any])


DEFAULT_REGISTRY = "sqlite:///{home}/registry.db"


RUNS_OFFERED = 200


"""Newest runs that a shell offers."""


registry_option = click.option(
    "--registry",
    "url",
    metavar="URL",
    envvar="RLX_REGISTRY",
    default=DEFAULT_REGISTRY,
    help="URL of the registry of runs; by default the one in RLX_HOME.",
)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def overrides_option(
    metavar: str = "PATH=VALUE", help: str = "Override a value; can be repeated."
) -> Callable[[Command], Command]:
    """Returns the option `--set`, which can be repeated."""
    return click.option("--set", "overrides", multiple=True, metavar=metavar, help=help)


def complete_run(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offers the newest runs by their ids, and `latest`; nothing without a registry."""
    from rlx.launch import get_registry_url, open_registry

    offered = [CompletionItem("latest", help="the newest run")]
    with suppress(RlxError), open_registry(get_registry_url(context.params.get("url"))) as registry:
        offered += [
            CompletionItem(row.id, help=f"{row.name} seed {row.seed} {row.effective_status}")
            for row in registry.queries.run_rows()[:RUNS_OFFERED]
        ]
    return [item for item in offered if str(item.value).startswith(incomplete)]


def complete_plugin(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offers the installed plugins by their names."""
    from rlx.discovery import list_installed_plugins

    return [
        CompletionItem(found.name, help=f"{found.kind} of {found.source}")
        for found in list_installed_plugins()
        if found.name.startswith(incomplete)
    ]
