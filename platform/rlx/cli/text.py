"""Plain tables, and warnings on stderr."""

from collections.abc import Iterable, Sequence

from rlx.cli.output import print_report
from rlx.spec.reading import Diagnostic, format_diagnostic
from rlx.text import escape_unprintable

__all__ = ["format_columns", "print_warnings"]


def print_warnings(warnings: Iterable[Diagnostic]) -> None:
    """Prints warnings to stderr."""
    for warning in warnings:
        print_report(format_diagnostic(warning))


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
