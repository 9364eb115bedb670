"""Plain tables and colored reports for terminals."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

import click

from rlx.spec.reading import Diagnostic, format_diagnostic
from rlx.text import escape_unprintable

__all__ = ["color_report", "format_columns", "print_warnings"]

_STYLES = (
    (re.compile(r"^error:", re.M), {"fg": "red", "bold": True}),
    (re.compile(r"^warning:", re.M), {"fg": "yellow", "bold": True}),
    (re.compile(r"^  -->", re.M), {"fg": "blue", "bold": True}),
    (re.compile(r"(?<=\| )\s*\^+$", re.M), {"fg": "red", "bold": True}),
    (re.compile(r"^ +[0-9]* \|(?= |$)", re.M), {"fg": "blue", "bold": True}),
    (re.compile(r"(?<= = )(?:help|note):", re.M), {"bold": True}),
)


def color_report(text: str, stream: TextIO) -> str:
    """Colors a rendered report if `stream` is a terminal and NO_COLOR is unset."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    for pattern, style in _STYLES:
        text = pattern.sub(lambda m, style=style: click.style(m[0], **style), text)  # type: ignore[misc]
    return text


def print_warnings(warnings: Iterable[Diagnostic]) -> None:
    """Prints warnings to stderr."""
    for warning in warnings:
        click.echo(color_report(format_diagnostic(warning), sys.stderr), err=True)


def format_columns(rows: Iterable[Sequence[str]], heads: Sequence[str] = ()) -> str:
    """Returns rows as left-aligned columns; control characters are made visible."""
    table = [
        [escape_unprintable(cell) for cell in row]
        for row in ([heads] if heads else []) + list(rows)
    ]
    if not table:
        return ""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)
