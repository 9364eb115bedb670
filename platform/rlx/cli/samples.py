"""`rlx samples`: a run's rollouts with their rewards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rlx.cli.completion import complete_run
from rlx.cli.options import json_option, registry_option
from rlx.cli.output import print_json, print_text
from rlx.errors import SpecError
from rlx.launch import locate_run_folder, open_registry
from rlx.results import load_step_accounts, select_rollout_steps
from rlx.text import escape_unprintable
from rlx_registry import (
    BodyError,
    BodyRecord,
    RolloutIndex,
    RunRecord,
    TreeRecord,
    read_body,
    read_trees,
)

__all__ = ["samples"]

SHOWN = 20
"""Default number of table rows."""
PROMPT, TEXT = 240, 70
"""Characters of a prompt and of a turn that a table shows."""


@click.command()
@click.argument("run", default="latest", shell_complete=complete_run)
@click.option(
    "--step", type=click.IntRange(min=1), help="The step to show; the last one by default."
)
@click.option("--group", "tree", type=int, help="Only this prompt (column TREE).")
@click.option("--sort", type=click.Choice(["tree", "reward", "advantage"]), default="tree")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    help=f"Maximum number of rows: {SHOWN}, or all with --export.",
)
@click.option("--whole", is_flag=True, help="Show prompts and turns in full.")
@click.option("--credit", is_flag=True, help="Show rewards, KL and advantages per token.")
@click.option(
    "--row",
    "numbers",
    type=int,
    multiple=True,
    help="With --credit: show this row; can be repeated.",
)
@click.option(
    "--export",
    "file",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Write the rows with all their tokens as JSON Lines; `-` is stdout.",
)
@json_option
@registry_option
def samples(
    run: str,
    step: int | None,
    tree: int | None,
    sort: str,
    limit: int | None,
    whole: bool,
    credit: bool,
    numbers: tuple[int, ...],
    file: Path | None,
    as_json: bool,
    url: str,
) -> None:
    """Show RUN's rollouts: prompts, then turns with their reward components and advantages."""
    if numbers and not credit:
        raise SpecError("--row N shows a row token by token: add --credit")
    if file is not None and (credit or as_json):
        raise SpecError(
            "--export writes every row with its tokens, as JSON Lines: drop --json and --credit"
        )
    found, at, rows, body = _load_rollout_step(run, step, url)
    if tree is not None and not any(row.tree == tree for row in rows):
        there = f"; it has 0 to {max(row.tree for row in rows)}" if rows else ""
        raise SpecError(f"step {at} of {found.id} has no prompt {tree}{there}")
    rows = [row for row in rows if tree is None or row.tree == tree]
    if credit:
        return _show_credit_rows(found, at, body, {row.row for row in rows}, numbers, as_json)
    if sort != "tree":
        rows.sort(key=lambda row: -(getattr(row, sort) or 0.0))
    else:
        rows.sort(key=_tree_order)
    if file is not None:
        return _write_rollout_rows(found, at, body, [row.row for row in rows[:limit]], file)
    rows, count = rows[: limit or SHOWN], len(rows)
    if as_json:
        return print_json([_sample_json(found, at, row) for row in rows])
    print_text(f"{found.id} step {at}: {count} rows")
    return _show_samples(rows, _read_trees(found, body, rows), whole=whole)


def _load_rollout_step(
    run: str, step: int | None, url: str
) -> tuple[RunRecord, int, list[RolloutIndex], BodyRecord]:
    """Returns a run, a step (the last one by default), and the step's rollout index and body."""
    with open_registry(url) as registry:
        found = registry.run(run)
        at = select_rollout_steps(registry, found, () if step is None else (step,))[-1]
        rows = registry.results.rollout_index(found.id, at)
        return found, at, rows, registry.results.rollout_body(found.id, at)


def _write_rollout_rows(
    run: RunRecord, step: int, body: BodyRecord, rows: Sequence[int], file: Path
) -> None:
    """Writes rows of a step as JSON Lines, in order."""
    from rlx.cli.export_rollouts import json_lines
    from rlx.home import format_path
    from rlx.record import read_step

    if file.is_dir():
        raise SpecError(f"--export {escape_unprintable(str(file))} is a folder; name a file in it")
    if not file.parent.is_dir():
        raise SpecError(f"--export: there is no folder {escape_unprintable(str(file.parent))}")
    stored = read_step(read_body(locate_run_folder(run, body.path).root / body.path, body.sha256))
    about = {"run": run.id, "step": step, "phase": body.statistics["phase"]}
    lines = json_lines(stored, rows, about)
    if str(file) == "-":
        for line in lines:
            print_text(line)
        return
    with file.open("w", encoding="ascii") as out:
        out.writelines(f"{line}\n" for line in lines)
    print_text(
        f"{len(rows)} rows of step {step} of {run.id}: {escape_unprintable(format_path(file))}",
        err=True,
    )


def _show_credit_rows(
    run: RunRecord,
    step: int,
    body: BodyRecord,
    there: set[int],
    numbers: Sequence[int],
    as_json: bool,
) -> None:
    """Prints the per-token credit of a step's rows, as `rlx plan` does.

    `there` holds the rows that may be shown.
    """

    from rlx.cli.console import open_console
    from rlx.plan import convert_to_json, select_example_rows, show_rows

    if missing := sorted(set(numbers) - there):
        raise SpecError(f"--row {missing[0]}: step {step} of {run.id} has no such row here")
    found, phase = load_step_accounts(run, body), str(body.statistics["phase"])
    accounts = found.rows
    selected = numbers or select_example_rows(
        [a for a in accounts if a.row in there], found.spec.evaluation.correct
    )
    note = (
        "" if found.decoded else "the run's tokenizer is not on this machine: token ids are shown"
    )
    if as_json:
        rows = [convert_to_json(a) for a in accounts if a.row in (set(numbers) or there)]
        return print_json({"run": run.id, "step": step, "phase": phase, "note": note, "rows": rows})
    print_text(f"{run.id} step {step}, phase {escape_unprintable(phase)}: {len(accounts)} rows")
    if note:
        print_text(note, err=True)
    return show_rows(accounts, selected, open_console())


def _tree_order(row: RolloutIndex) -> tuple[int, int, int]:
    """Returns a sort key that places each answer before its confidences."""
    parent = row.row if row.parent_row is None else row.parent_row
    return row.tree, parent, row.row


def _sample_json(run: RunRecord, step: int, row: RolloutIndex) -> dict[str, Any]:
    return {"run": run.id, "step": step, **{n: getattr(row, n) for n in RolloutIndex.__slots__}}


def _read_trees(
    run: RunRecord, body: BodyRecord, rows: Sequence[RolloutIndex]
) -> dict[int, TreeRecord]:
    """Reads the trees of some rows, by number; none, with a warning, if their file is damaged."""
    path = locate_run_folder(run, body.path).root / body.path
    try:
        found = read_trees(path, body.sha256, {row.tree for row in rows})
    except BodyError as error:
        print_text(f"warning: no prompts are shown: {escape_unprintable(str(error))}", err=True)
        return {}
    return {tree["tree"]: tree for tree in found}


def _show_samples(
    rows: Sequence[RolloutIndex], trees: Mapping[int, TreeRecord], *, whole: bool
) -> None:
    """Prints the prompts of rows, then the rows."""
    from rich.table import Column

    from rlx.cli.console import print_table

    shown = [number for number in dict.fromkeys(row.tree for row in rows) if number in trees]
    if shown:
        prompts = [_format_sample_text(trees[n]["prompt"], PROMPT, whole=whole) for n in shown]
        print_table(
            "TREE", "PROMPT", rows=[(str(n), p) for n, p in zip(shown, prompts, strict=True)]
        )
        print_text("")
    texts = {
        row["row"]: tree["segments"][row["segment"]]["text"]
        for tree in trees.values()
        for row in tree["rows"]
    }
    cells = [
        (
            *_format_sample_cells(row),
            _format_sample_text(texts.get(row.row, row.preview), TEXT, whole=whole),
        )
        for row in rows
    ]
    heads = [Column(head, no_wrap=True) for head in ("ROW", "TREE", "TURN", "REWARD", "ADVANTAGE")]
    print_table(*heads, "PARTS", "TEXT", rows=cells)


def _format_sample_text(text: str, longest: int, *, whole: bool) -> str:
    line = escape_unprintable(text.replace("\n", "⏎"))
    return line if whole or len(line) <= longest else f"{line[: longest - 1]}…"


def _format_sample_cells(row: RolloutIndex) -> tuple[str, ...]:
    parts = " ".join(f"{n}={'absent' if v is None else f'{v:g}'}" for n, v in row.rewards.items())
    return (
        str(row.row),
        str(row.tree),
        ("  " if row.parent_row is not None else "") + escape_unprintable(row.turn),
        "absent" if row.reward is None else f"{row.reward:.3f}",
        f"{row.advantage:+.3f}",
        escape_unprintable(parts + (f"  ({row.failed})" if row.failed else "")),
    )
