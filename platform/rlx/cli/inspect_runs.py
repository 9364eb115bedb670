"""Read-only commands: `rlx runs`, `status` and `logs`."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.completion import complete_run
from rlx.cli.options import json_option, registry_option
from rlx.cli.output import print_json, print_text
from rlx.cli.run_filters import filter_options, select_runs
from rlx.cli.run_json import describe_runs
from rlx.home import RunFolder
from rlx.launch import open_registry
from rlx.text import escape_unprintable
from rlx_registry import ENDED, IDLE_STEPS, Registry, RunRecord

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["logs", "runs", "status"]

SHOWN = 50
"""Runs that a table lists by default."""
_UNLIMITED = 100_000
"""Columns in which any table fits."""


@click.command()
@filter_options
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help=f"Maximum number of runs, newest first; {SHOWN} by default, with --json every run.",
)
@click.option("--all", "whole", is_flag=True, help="List every run.")
@json_option
@registry_option
def runs(
    limit: int | None,
    whole: bool,
    as_json: bool,
    url: str,
    **filters: Any,
) -> None:
    """List runs, newest first."""
    if limit is None and not (whole or as_json):
        limit = SHOWN
    with open_registry(url) as registry:
        found, others = select_runs(registry, **filters, limit=None if whole else limit)
        described = describe_runs(registry, [_look_at_job(registry, run) for run in found])
    if as_json:
        return print_json(described)
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
        )
        for d in described
    ]
    _print_run_table(rows, [d["groups"] for d in described])
    if others:
        text = "1 older run is" if others == 1 else f"{others} older runs are"
        print_text(f"{text} not shown; --all shows every run", err=True)
    return None


def _look_at_job(registry: Registry, run: RunRecord) -> RunRecord:
    """The run, updated from the state of its job if it has one."""
    if run.directory is None or not RunFolder(Path(run.directory)).job.exists():
        return run
    from rlx.launch import reconcile_job  # imported here: it is slow, and few runs are jobs

    return reconcile_job(registry, run)


def _print_run_table(rows: Sequence[tuple[str, ...]], groups: Sequence[Sequence[str]]) -> None:
    """Prints runs with their groups: in a column, or if it does not fit, in a table below."""
    from rich.table import Column

    from rlx.cli.console import build_table, open_console

    console = open_console()
    heads = ("NAME", "SEED", "STATUS", "STEP", "ACCURACY", "BRIER", "ECE", "AGE")

    def build_run_table(*more: str, rows: Iterable[tuple[str, ...]]) -> "Table":
        return build_table(Column("RUN", no_wrap=True), *heads, *more, rows=rows, is_text=True)

    members: dict[str, list[str]] = {}
    for (run, *_), own in zip(rows, groups, strict=True):
        for group in own:
            members.setdefault(group, []).append(run)
    table = build_run_table(rows=rows)
    if members:
        joined = (" ".join(own) for own in groups)
        wide = build_run_table("GROUP", rows=[(*r, g) for r, g in zip(rows, joined, strict=True)])
        free = console.options.update(width=_UNLIMITED)
        if console.measure(wide, options=free).maximum > console.width:
            console.print(table, "")
            found = [(group, " ".join(runs)) for group, runs in members.items()]
            table = build_table("GROUP", "RUNS", rows=found, is_text=True)
        else:
            table = wide
    console.print(table)


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
        found = _look_at_job(registry, registry.run(run))
        (described,) = describe_runs(registry, [found])
        if as_json:
            return print_json(described)
        if found.status == "finished":
            from rlx.cli.console import open_console
            from rlx.cli.summary import show_run_summary

            return show_run_summary(registry, found, open_console())
        events = registry.results.events(found.id)
    from rlx.launch import BROKEN_OFF, is_abandoned, is_half_made
    from rlx.run import read_progress

    stage = None
    if found.directory is not None:
        stage = read_progress(RunFolder(Path(found.directory)).progress)
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
    if (idle := described["steps_without_gradient"]) >= IDLE_STEPS:
        lines.append(f"warning  no gradient in the last {idle} steps: see `rlx samples {found.id}`")
    lines += [f"event    {e.kind}: {e.message}" for e in events[-3:]]
    if found.directory is not None:
        lines.append(f"log      {os.path.relpath(RunFolder(Path(found.directory)).log)}")
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
    from rlx.launch import locate_run_folder

    with open_registry(url) as registry:
        found = registry.run(run)
        if as_json:
            return print_json(
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
