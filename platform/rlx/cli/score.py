"""`rlx score`: scores a file of responses with a reward plugin."""

import math
import sys
import time
from statistics import fmean

import click

from rlx.cli.output import format_json, print_text
from rlx.cli.progress import open_progress
from rlx.cli.verb_group import overrides_option
from rlx.errors import SpecError
from rlx.plugin_files import keep_plugin_file
from rlx.reward import build_reward, open_response_lines, score_lines
from rlx.text import escape_unprintable

ID_WIDTH = 16
"""Columns of a terminal in which most ids fit."""


@click.command()
@click.option("--reward", "name", required=True, metavar="NAME", help="A plugin, or FILE.py:NAME.")
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
    """Score the responses in FILE, one JSON object per line; `-` is stdin.

    A line holds `response` and the fields of its task, at the top level or under `problem`; also
    `turn`, `of`, `spans`, `info`, `id` and `group` where the reward needs them. Every line produces
    one line of output. The exit code is 0 when all lines are scored and 1 when some are not.
    """
    if math.isnan(deadline):  # click.FloatRange accepts nan
        raise SpecError("--deadline nan is not a number of seconds")
    plugin = build_reward(keep_plugin_file(name), overrides)
    values, absent, began = list[float](), 0, time.monotonic()
    with (
        open_response_lines(file) as read,
        open_progress("scoring", "lines", hidden=sys.stdout.isatty()) as move,
    ):
        if not as_json:
            print_text(_format_score_row("LINE", "ID", "SCORE", "REASON"))
        for scored in score_lines(plugin, read, field=field, workers=workers, deadline=deadline):
            lines = []
            for each in scored:
                verdict = each.verdict
                values += [] if verdict is None else [verdict.value]
                absent += verdict is None
                if as_json:
                    lines.append(format_json(each.to_plain_dict(), allow_nan=False))
                    continue
                parts = verdict.parts.items() if verdict else ()
                why = [each.reason or "", *(f"{part}={value:g}" for part, value in parts)]
                number = "absent" if verdict is None else f"{verdict.value:g}"
                name = "" if each.line.id is None else str(each.line.id)
                details = "  ".join(filter(None, why))
                lines.append(_format_score_row(str(each.line.number), name, number, details))
            print_text("\n".join(lines))
            move(len(values) + absent)
    sys.stdout.flush()
    mean = f"mean score {fmean(values):.4g}; " if values else ""
    rate = (len(values) + absent) / max(time.monotonic() - began, 1e-9)
    print_text(f"{len(values)} scored, {absent} absent; {mean}{rate:,.0f} lines/s", err=True)
    return 1 if absent else 0


def _format_score_row(line: str, name: str, number: str, details: str) -> str:
    """Formats a row on its own: rows are printed while others are scored, perhaps millions."""
    from rich.cells import cell_len

    name = escape_unprintable(name)
    name += " " * (ID_WIDTH - cell_len(name))
    return f"{line:>7}  {name}  {number:>9}  {escape_unprintable(details)}".rstrip()
