"""`rlx rescore`: recomputes rewards and advantages of stored rollouts, with any rules."""

import json
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx.checks import check_read_spec, read_spec, validate_document
from rlx.cli.output import format_json, print_text
from rlx.cli.progress_bar import open_progress_bar
from rlx.cli.registry import locate_run_folder, open_registry, registry_option
from rlx.discovery import describe_plugin_changes
from rlx.errors import SpecError
from rlx.spec import ExperimentSpec
from rlx.spec.reading import apply_overrides, label_refusal, parse_yaml_document
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

if TYPE_CHECKING:
    from rlx.audit import RescoredStep, RescoringSummary

__all__ = ["rescore"]

RULES = ("rewards", "mask", "estimator", "credit", "loss", "evaluation")
"""Spec sections that determine rewards and advantages; the others determine what was sampled."""

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("run")
@click.option(
    "--spec", "file", type=_FILE, metavar="FILE", help="Take the rules of this experiment."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value of the rules; can be repeated.",
)
@click.option(
    "--step", "requested", type=click.IntRange(min=1), multiple=True, help="Only this step."
)
@click.option(
    "--rows", type=click.IntRange(min=0), default=1, show_default=True,
    help="Show this many rows, those whose advantages change most.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@registry_option
def rescore(
    run: str,
    file: Path | None,
    overrides: tuple[str, ...],
    requested: tuple[int, ...],
    rows: int,
    as_json: bool,
    url: str,
) -> None:
    """Recompute rewards, masks and advantages of stored rollouts, without sampling.

    With the run's own experiment, the results equal the stored ones bit for bit. With --set, or the
    rules of --spec FILE (rewards, mask, estimator, credit, loss, evaluation), the command shows
    what would change: per reward, per token stream, and token by token.
    """
    from rlx.audit import RescoringSummary
    from rlx.audit import rescore_steps as rescored

    with open_registry(url) as registry:
        found = registry.run(run)
        spec, own, notes = _build_rescore_spec(found, file, overrides)
        steps = _select_rescore_steps(found, registry.results.rollout_steps(found.id), requested)
        summary, most = RescoringSummary(found.id), _MostChangedRows(rows)
        with open_progress_bar("rescoring", "steps", len(steps)) as show:
            done = count(1)
            changed = rescored(
                registry, found, spec, steps, own=own, show=lambda _: show(next(done))
            )
            for one in changed:
                summary.add(one)
                most.keep_largest(one)
    if as_json:
        print_text(format_json(_build_rescore_json(summary, most), indent=2))
    else:
        _show_rescore_summary(found, summary, most, notes)


@label_refusal("rescored")
def _build_rescore_spec(
    run: RunRecord, file: Path | None, overrides: Sequence[str]
) -> tuple[ExperimentSpec, bool, list[str]]:
    """Returns the experiment to rescore with, whether it is the run's own, and, for its own, what
    has become of its plugins since."""
    wrong = sorted(o for o in overrides if o.partition("=")[0].split(".")[0] not in RULES)
    if wrong:
        raise SpecError(
            f"--set {escape_unprintable(wrong[0])}: stored rollouts cannot be changed; only "
            f"{', '.join(RULES)} may be changed"
        )
    tree: dict[str, Any] = json.loads(json.dumps(run.spec))
    if file is not None:
        other = read_spec(file).spec.dump_resolved()
        tree |= {name: other[name] for name in RULES}
    document = parse_yaml_document(json.dumps(tree, indent=2), f"the experiment of {run.id}")
    read = validate_document(apply_overrides(document, overrides), Path(document.file))
    plugins = check_read_spec(read)
    own = read.spec.dump_resolved() == _resolve_run_spec(run)
    notes = describe_plugin_changes(plugins.provenance, run.plugins) if own else ()
    return read.spec, own, list(dict.fromkeys(notes))


def _resolve_run_spec(run: RunRecord) -> dict[str, Any]:
    return ExperimentSpec.model_validate_json(json.dumps(run.spec), strict=True).dump_resolved()


def _select_rescore_steps(
    run: RunRecord, there: Sequence[int], requested: Sequence[int]
) -> list[int]:
    if not there:
        raise SpecError(f"{run.id} has recorded no rollouts")
    if missing := sorted(set(requested) - set(there)):
        raise SpecError(
            f"{run.id} has no rollouts of step {missing[0]}; it has steps {there[0]} to {there[-1]}"
        )
    return sorted(set(requested)) or list(there)


class _MostChangedRows:
    """Collects the rows whose advantages change most.

    Args:
        count: number of rows to keep.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.rows: list[tuple[float, int, RescoredStep]] = []

    def keep_largest(self, found: "RescoredStep") -> None:
        """Keeps the rows of a step that are among the largest changes so far."""
        old, new = found.stored.rows.tokens["advantages"], found.rows.tokens["advantages"]
        if not self._count or old is None or new is None or not len(new):
            return
        gaps = (new - old[found.kept][:, : new.shape[1]]).abs().amax(dim=1)
        worst = gaps.sort(descending=True)
        for gap, row in zip(worst.values.tolist(), worst.indices.tolist(), strict=True):
            if gap == 0 or (len(self.rows) == self._count and gap <= self.rows[-1][0]):
                break
            self.rows = sorted([*self.rows, (gap, row, found)], key=lambda r: -r[0])
            self.rows = self.rows[: self._count]


# Output ----------------------------------------------------------------------------------------


def _build_rescore_json(summary: "RescoringSummary", most: _MostChangedRows) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "run": summary.run,
        "steps": summary.steps,
        "same": summary.is_identical,
        "rows_left_out": summary.left,
        "changes": [asdict(change) for change in summary.changes.values()],
        "rows": [
            {
                "step": found.step,
                "row": int(found.kept[row]),
                "tokens": _list_token_changes(found, row),
            }
            for _, row, found in most.rows
        ],
    }


def _list_token_changes(found: "RescoredStep", row: int) -> list[dict[str, Any]]:
    """Returns the stored and the recomputed values of the row's own tokens."""
    stored, number = found.stored, int(found.kept[row])
    tree, segment, *_ = stored.rows.places[number]
    ids = stored.trees[tree].token_ids(segment)
    lines = []
    for position in found.rows.own[row].nonzero()[:, 0].tolist():
        line: dict[str, Any] = {"position": position, "token": ids[position]}
        for name in ("mask", "token_rewards", "advantages"):
            old, new = stored.rows.tokens[name], found.rows.tokens[name]
            line[name] = None if old is None else old[number, position].item()
            line[f"new_{name}"] = None if new is None else new[row, position].item()
        lines.append(line)
    return lines


def _show_rescore_summary(
    run: RunRecord, summary: "RescoringSummary", most: _MostChangedRows, notes: Sequence[str]
) -> None:
    from rich import box
    from rich.table import Table

    from rlx.cli.console import open_console

    console = open_console()
    steps = len(summary.steps)
    scores = sum(c.n for c in summary.changes.values() if c.unit == "scores")
    tokens = max((c.n for c in summary.changes.values() if c.unit == "tokens"), default=0)
    of = f"{scores} rewards and {tokens} tokens of {steps} step{'s' * (steps != 1)}"
    if summary.is_identical:
        console.print(f"{run.id}: {of} are bit-identical to the stored ones")
        return
    console.print(f"{run.id}: {of}, recomputed", style="bold")
    for note in notes:
        console.print(escape_unprintable(note))
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in ("of", "changed", "mean then", "now", "largest", "turned"):
        table.add_column(heading, justify="right", no_wrap=True)
    order = ("scores", "rows", "tokens")
    for change in sorted(summary.changes.values(), key=lambda c: order.index(c.unit)):
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
    for change in summary.changes.values():
        if change.appeared or change.vanished:
            gone = f"{change.appeared} had no value before, {change.vanished} have none now"
            console.print(f"{escape_unprintable(change.what)}: {gone}")
    if summary.left:
        console.print(f"{summary.left} trained rows would have been left out")
    for _, row, found in most.rows:
        _show_rescored_row(run, found, row, console)
    sys.stdout.flush()


def _show_rescored_row(run: RunRecord, found: "RescoredStep", row: int, console: Any) -> None:
    """Prints the tokens of one row with their stored and recomputed values."""
    from rich import box
    from rich.table import Table

    from rlx.plan import load_run_speech

    speech = load_run_speech(found.recipe.spec.model, locate_run_folder(run).model)
    kind = found.stored.rows.places[int(found.kept[row])][3]
    table = Table(
        title=f"step {found.step}, row {int(found.kept[row])} ({escape_unprintable(kind)})",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
    )
    for heading in ("token", "mask", "reward then", "now", "advantage then", "now"):
        table.add_column(heading, justify="right" if heading != "token" else "left")
    for line in _list_token_changes(found, row):
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
