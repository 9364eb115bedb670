"""`rlx score`: scores a file of responses with a reward plugin."""

import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import click

from rlx.cli.output import format_json, print_text
from rlx.cli.progress import open_progress
from rlx.cli.verb_group import overrides_option
from rlx.errors import SpecError
from rlx.plugin_files import keep_plugin_file
from rlx.reward import ScoredLine, build_reward, open_response_lines, score_lines
from rlx.text import escape_unprintable

ID_WIDTH = 16
"""Columns of a terminal in which most ids fit."""


@dataclass(slots=True)
class _Count:
    scored: int = 0
    absent: int = 0
    total: float = 0.0

    def add(self, batch: Iterable[ScoredLine]) -> None:
        for each in batch:
            if each.verdict is None:
                self.absent += 1
            else:
                self.scored += 1
                self.total += each.verdict.value

    @property
    def lines(self) -> int:
        return self.scored + self.absent

    def describe_counts(self, seconds: float) -> str:
        mean = f"mean score {self.total / self.scored:.4g}; " if self.scored else ""
        rate = self.lines / seconds if seconds > 0 else 0.0
        return f"{self.scored} scored, {self.absent} absent; {mean}{rate:,.0f} lines/s"


@click.command()
@click.option(
    "--reward",
    "name",
    required=True,
    metavar="NAME",
    help="Name of a reward plugin, or FILE.py:NAME.",
)
@click.argument("file", metavar="FILE")
@overrides_option("OPTION=VALUE", "Set an option of the reward; can be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON Lines.")
@click.option(
    "--response-field",
    "field",
    default="response",
    show_default=True,
    help="JSON key of the response.",
)
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, max=86_400, min_open=True),
    default=5.0,
    show_default=True,
    help="Time limit of one call, in seconds.",
)
def score(
    name: str,
    file: str,
    overrides: tuple[str, ...],
    as_json: bool,
    field: str,
    workers: int,
    deadline: float,
) -> int:
    """Score the responses in FILE, one JSON object per line; `-` is stdin, gzip is decompressed.

    A line holds `response` and the fields of its task, at the top level or under `problem`; also
    `turn`, `of`, `spans`, `info`, `id` and `group` where the reward needs them. Every line produces
    one line of output. The exit code is 0 when all lines are scored and 1 when some are not.
    """
    if math.isnan(deadline):  # click.FloatRange accepts nan
        raise SpecError("--deadline nan is not a number of seconds")
    plugin = build_reward(keep_plugin_file(name), overrides)
    count = _Count()
    show = _print_json if as_json else _print_rows
    began = time.monotonic()
    with (
        open_response_lines(file) as lines,
        open_progress("scoring", "lines", hidden=sys.stdout.isatty()) as move,
    ):
        if not as_json:
            print_text(_format_score_row("LINE", "ID", "SCORE", "REASON"))
        for scored in score_lines(plugin, lines, field=field, workers=workers, deadline=deadline):
            show(scored)
            count.add(scored)
            move(count.lines)
    sys.stdout.flush()
    print_text(count.describe_counts(time.monotonic() - began), err=True)
    return 1 if count.absent else 0


def _print_json(batch: Iterable[ScoredLine]) -> None:
    print_text("\n".join(format_json(each.to_plain_dict(), allow_nan=False) for each in batch))


def _print_rows(batch: Iterable[ScoredLine]) -> None:
    rows = []
    for each in batch:
        number = "absent" if each.verdict is None else f"{each.verdict.value:g}"
        parts = each.verdict.parts.items() if each.verdict else ()
        why = [] if each.reason is None else [each.reason]
        details = "  ".join([*why, *(f"{part}={value:g}" for part, value in parts)])
        name = "" if each.line.id is None else str(each.line.id)
        rows.append(_format_score_row(str(each.line.number), name, number, details))
    print_text("\n".join(rows))


def _format_score_row(line: str, name: str, number: str, details: str) -> str:
    """Formats a row on its own: rows are printed while others are scored, perhaps millions."""
    from rich.cells import cell_len

    name = escape_unprintable(name)
    name += " " * (ID_WIDTH - cell_len(name))
    return f"{line:>7}  {name}  {number:>9}  {escape_unprintable(details)}".rstrip()
