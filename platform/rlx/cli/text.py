"""Warnings on stderr."""

from collections.abc import Iterable

from rlx.cli.output import print_report
from rlx.spec.reading import Diagnostic, format_diagnostic

__all__ = ["print_warnings"]


def print_warnings(warnings: Iterable[Diagnostic]) -> None:
    """Prints warnings to stderr."""
    for warning in warnings:
        print_report(format_diagnostic(warning))
