"""`rlx rescore`: recomputes rewards and advantages of stored rollouts, with any rules."""

import sys
from pathlib import Path
from typing import Any

import click

from rlx import results
from rlx.cli.console import open_console
from rlx.cli.output import print_json
from rlx.cli.progress import open_progress
from rlx.cli.tables import build_table
from rlx.cli.verb_group import json_option, overrides_option, registry_option
from rlx.results import Rescoring
from rlx.text import escape_unprintable

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("run")
@click.option(
    "--spec", "experiment", type=_FILE, metavar="FILE", help="Take the rules of this experiment."
)
@overrides_option("KEY=VALUE", "Override a value of the rules; can be repeated.")
@click.option("--step", "steps", type=click.IntRange(min=1), multiple=True, help="Only this step.")
@json_option
@registry_option
def rescore(as_json: bool, url: str, **options: Any) -> None:
    """Recompute rewards, masks and advantages of stored rollouts, without sampling.

    With the run's own experiment, the results equal the stored ones bit for bit. With --set, or the
    rules of --spec FILE (rewards, mask, estimator, credit, loss, evaluation), the command shows
    what would change, per reward and per token stream.
    """
    with open_progress("rescoring", "steps") as show:
        found = results.rescore(**options, registry=url, show=show)
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
    sys.stdout.flush()
