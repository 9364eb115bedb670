"""`rlx rescore` recomputes rewards and advantages of stored rollouts, `rlx score` scores a file."""

import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx import results
from rlx.cli.console import build_table, open_console
from rlx.cli.options import complete_run, json_option, overrides_option, registry_option
from rlx.cli.output import format_json, print_json, print_text
from rlx.cli.progress import open_progress
from rlx.errors import SpecError
from rlx.launch import locate_run_folder
from rlx.plugin_files import keep_plugin_file
from rlx.results import ChangedRow, RescoreRequest, Rescoring
from rlx.reward import ScoredLine, build_reward, open_response_lines, score_lines
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

if TYPE_CHECKING:
    from rich.console import Console

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("run", shell_complete=complete_run)
@click.option(
    "--spec", "experiment", type=_FILE, metavar="FILE", help="Take the rules of this experiment."
)
@overrides_option("KEY=VALUE", "Override a value of the rules; can be repeated.")
@click.option("--step", "steps", type=click.IntRange(min=1), multiple=True, help="Only this step.")
@click.option(
    "--rows", type=click.IntRange(min=0), default=1, show_default=True,
    help="Show this many rows, those whose advantages change most.",
)  # fmt: skip
@json_option
@registry_option
def rescore(as_json: bool, url: str, **options: Any) -> None:
    """Recompute rewards, masks and advantages of stored rollouts, without sampling.

    With the run's own experiment, the results equal the stored ones bit for bit. With --set, or the
    rules of --spec FILE (rewards, mask, estimator, credit, loss, evaluation), the command shows
    what would change: per reward, per token stream, and token by token.
    """
    with open_progress("rescoring", "steps") as show:
        found = results.rescore(RescoreRequest(**options), registry=url, show=show)
    if as_json:
        print_json(found.to_json())
    else:
        _show_rescoring(found)


def _show_rescoring(result: Rescoring) -> None:
    console, run = open_console(), result.run
    steps = len(result.steps)
    scores = sum(c.n for c in result.changes.values() if c.unit == "scores")
    tokens = max((c.n for c in result.changes.values() if c.unit == "tokens"), default=0)
    of = f"{scores} rewards and {tokens} tokens of {steps} step{'s' * (steps != 1)}"
    if result.is_identical:
        console.print(f"{run.id}: {of} are bit-identical to the stored ones")
        return
    console.print(f"{run.id}: {of}, recomputed", style="bold")
    for note in result.notes:
        console.print(escape_unprintable(note))
    table = build_table("", "of", "changed", "mean then", "now", "largest", "turned")
    for column in table.columns:
        column.no_wrap = True
    order = ("scores", "rows", "tokens")
    for change in sorted(result.changes.values(), key=lambda c: order.index(c.unit)):
        table.add_row(
            escape_unprintable(change.what),
            f"{change.n} {change.unit}",
            f"{change.changed}",
            *("–" if mean is None else f"{mean:.4g}" for mean in change.means),
            f"{change.largest:.3g}",
            f"{change.turned}" if change.what == "advantages" else "",
        )
    console.print(table)
    note = (
        "rewards are multiplied by their weights; means skip absent values, and on tokens are of "
        "absolute values; turned: advantages whose sign changed"
    )
    console.print(note, style="dim")
    for change in result.changes.values():
        if change.appeared or change.vanished:
            gone = f"{change.appeared} had no value before, {change.vanished} have none now"
            console.print(f"{escape_unprintable(change.what)}: {gone}")
    if result.left:
        console.print(f"{result.left} trained rows would have been left out")
    for row in result.rows:
        _show_rescored_row(run, row, console)
    sys.stdout.flush()


def _show_rescored_row(run: RunRecord, changed: ChangedRow, console: "Console") -> None:
    """Prints the tokens of one row with their stored and recomputed values."""
    from rlx.plan import load_run_speech

    found = changed.found
    folder = locate_run_folder(run)
    speech = load_run_speech(found.setup.spec.model, folder.tokenizer, folder.model)
    kind = escape_unprintable(found.stored.rows.places[changed.number][3])
    heads = ("token", "mask", "reward then", "now", "advantage then", "now")
    table = build_table(
        *heads, title=f"step {found.step}, row {changed.number} ({kind})", padding=(0, 1)
    )
    for line in changed.list_tokens():
        text = str(line["token"]) if speech is None else speech.read([line["token"]])[0]
        masks = f"{int(line['mask'])}→{int(line['new_mask'])}"
        table.add_row(
            escape_unprintable(text) or "·",
            masks if line["mask"] != line["new_mask"] else f"{int(line['mask'])}",
            *(
                "–" if line[name] is None else f"{line[name]:.4g}"
                for name in ("token_rewards", "new_token_rewards", "advantages", "new_advantages")
            ),
        )
    console.print()
    console.print(table)


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
