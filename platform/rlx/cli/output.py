"""The only way of plain text to the terminal: what a terminal obeys or hides is escaped. Tables,
pictures and progress bars go through `rlx.cli.console`."""

import json
import os
import re
import sys
from typing import Any, TextIO

import click

from rlx.text import escape_lines

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
    """A value as JSON of printable ASCII."""
    text = json.dumps(value, indent=indent, allow_nan=allow_nan)
    return text.replace("\x7f", "\\u007f")  # json.dumps does not escape DEL


def print_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints one line or several, escaped, to stdout, or with `err` to stderr."""
    click.echo(escape_lines(text), err=err, nl=nl)


def print_json(value: Any, *, allow_nan: bool = True) -> None:
    print_text(format_json(value, indent=2, allow_nan=allow_nan))


def print_report(text: str) -> None:
    """Prints a report of errors or warnings to stderr, escaped, and colored on a terminal."""
    click.echo(color_report(escape_lines(text), sys.stderr), err=True)
