"""Read-only commands: `rlx runs`, `status`, `logs`, `samples` and `mlflow`."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rlx.assess import load_step_accounts, select_rollout_steps
from rlx.cli.completion import complete_run
from rlx.cli.options import json_option, registry_option
from rlx.cli.output import format_json, print_text
from rlx.cli.run_filters import filter_options, select_runs
from rlx.cli.run_json import run_json
from rlx.errors import SpecError
from rlx.launch import (
    BROKEN_OFF,
    is_abandoned,
    is_half_made,
    locate_run_folder,
    open_registry,
    reconcile_job,
)
from rlx.text import escape_unprintable
from rlx_registry import (
    ENDED,
    IDLE_STEPS,
    BodyError,
    BodyRecord,
    RolloutIndex,
    RunRecord,
    TreeRecord,
    read_body,
    read_trees,
)

__all__ = ["logs", "runs", "samples", "status"]

SHOWN = 20
"""Default number of table rows."""
PROMPT, TEXT = 240, 70
"""Characters of a prompt and of a turn that a table shows."""


def _print_json_value(value: Any) -> None:
    print_text(format_json(value, indent=2))


@click.command()
@filter_options
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of runs, newest first.")
@json_option
@registry_option
def runs(
    limit: int | None,
    as_json: bool,
    url: str,
    **filters: Any,
) -> None:
    """List runs, newest first."""
    with open_registry(url) as registry:
        found = select_runs(registry, **filters, limit=limit)
        described = [run_json(registry, reconcile_job(registry, run)) for run in found]
    if as_json:
        return _print_json_value(described)
    rows = [
        (
            d["run"],
            escape_unprintable(d["name"]),
            str(d["seed"]),
            d["status"],
            f"{d['step']}/{d['steps'] or '?'}",
            _format_run_figure(d, "accuracy"),
            _format_run_figure(d, "brier"),
            _format_run_figure(d, "ece"),
            _format_run_age(d["created"]),
            " ".join(d["groups"]),
        )
        for d in described
    ]
    from rich.table import Column

    from rlx.cli.console import print_table

    run = Column("RUN", no_wrap=True)
    heads = (run, "NAME", "SEED", "STATUS", "STEP", "ACCURACY", "BRIER", "ECE", "AGE", "GROUP")
    columns = len(heads) if any(d["groups"] for d in described) else -1
    return print_table(*heads[:columns], rows=[row[:columns] for row in rows])


def _format_run_figure(run: dict[str, Any], name: str) -> str:
    """Formats a metric after training, or the one before training in parentheses."""
    for label, form in (("after", "{:.3f}"), ("before", "({:.3f})")):
        value = run["evaluation"].get(label, {}).get(name)
        if value is not None:
            return form.format(value)
    return ""


def _format_run_age(created: float) -> str:
    seconds = time.time() - created
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@click.command()
@click.argument("run", shell_complete=complete_run)
@json_option
@registry_option
def status(run: str, as_json: bool, url: str) -> None:
    """Show the status of RUN, given by its id, its number or `latest`."""
    with open_registry(url) as registry:
        found = reconcile_job(registry, registry.run(run))
        described = run_json(registry, found)
        idle = registry.queries.count_idle_steps(found.id)
        if as_json:
            return _print_json_value(described | {"steps_without_gradient": idle})
        if found.status == "finished":
            from rlx.cli.console import open_console
            from rlx.cli.summary import show_run_summary

            return show_run_summary(registry, found, open_console())
        events = registry.results.events(found.id)
    from rlx.run import read_progress

    stage = None
    if found.directory is not None:
        stage = read_progress(locate_run_folder(found).progress)
    why = found.reason
    if found.status in ("queued", "submitted") and is_abandoned(found):
        again = "submit it again" if is_half_made(found) else f"rlx resume {found.id}"
        why = f"{BROKEN_OFF}; {again}"
    lines = [
        f"{found.id}  {found.name}  seed {found.seed}  spec {found.digest}",
        f"status   {described['status']}{f': {why}' if why else ''}",
        f"step     {found.step} of {found.steps_total}"
        + (f"  (phase {found.phase})" if found.phase else ""),
    ]
    if stage is not None:
        lines.append(
            f"doing    {stage.stage} {stage.done}/{stage.total}  {stage.doing}  {stage.note}"
        )
    if idle >= IDLE_STEPS:
        lines.append(f"warning  no gradient in the last {idle} steps: see `rlx samples {found.id}`")
    lines += [f"event    {e.kind}: {e.message}" for e in events[-3:]]
    if found.directory is not None:
        lines.append(f"log      {os.path.relpath(locate_run_folder(found).log)}")
    print_text("\n".join(escape_unprintable(line) for line in lines))
    return None


@click.command()
@click.argument("run", default="latest", shell_complete=complete_run)
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the run ends.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=40, help="Lines to begin with.")
@click.option("--json", "as_json", is_flag=True, help="Print the run's events as JSON.")
@registry_option
def logs(run: str, follow: bool, lines: int, as_json: bool, url: str) -> None:
    """Show the output of RUN's processes."""
    with open_registry(url) as registry:
        found = registry.run(run)
        if as_json:
            return _print_json_value(
                [
                    {"at": e.at, "kind": e.kind, "level": e.level, "message": e.message}
                    for e in registry.results.events(found.id)
                ]
            )
        log = locate_run_folder(found).log
        offset = 0
        if log.is_file():
            content = log.read_bytes()
            text = content.decode(errors="replace")
            _print_lines("\n".join(text.splitlines()[-lines:]) if lines else "")
            offset = len(content)
        while follow and registry.run(found.id).effective_status not in ENDED:
            time.sleep(0.5)
            offset = _print_rest(log, offset)
        _print_rest(log, offset)
    return None


def _print_rest(log: Path, start: int) -> int:
    if not log.is_file():
        return start
    with log.open("rb") as file:
        file.seek(start)
        new = file.read()
    _print_lines(new.decode(errors="replace").rstrip("\n"))
    return start + len(new)


def _print_lines(text: str) -> None:
    for line in text.splitlines():
        print_text(escape_unprintable(line))


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
        return _print_json_value([_sample_json(found, at, row) for row in rows])
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
    stored = read_step(read_body(locate_run_folder(run).root / body.path, body.sha256))
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
        return _print_json_value(
            {"run": run.id, "step": step, "phase": phase, "note": note, "rows": rows}
        )
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
    path = locate_run_folder(run).root / body.path
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
