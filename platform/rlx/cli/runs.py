"""The commands about recorded runs: `rlx runs`, `status`, `logs` and `rm`."""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.output import print_json, print_text
from rlx.cli.verb_group import Command, complete_run, json_option, registry_option
from rlx.errors import EnvironmentFault, SpecError
from rlx.home import RunFolder, format_path
from rlx.launch import (
    Removal,
    choose_run_exit_code,
    format_disk_space,
    list_group_runs,
    open_registry,
    plan_removal,
    remove_run_data,
)
from rlx.text import escape_unprintable
from rlx_registry import (
    ENDED,
    STATUSES,
    EvaluationFigures,
    Registry,
    RunFilter,
    RunRecord,
    is_idle,
)

if TYPE_CHECKING:
    from rich.table import Table


SCORE = "score/total_score"
"""The mean total score of the latest step's rows, which every run records."""
RUNS_LISTED = 50
"""Runs that a table lists by default."""


_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _parse_age(text: str) -> float:
    """Returns the seconds of an age such as `30d`."""
    match = re.fullmatch(r"([0-9]{1,6})(s|min|h|d|w)", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no age: write 90min, 12h, 30d or 2w")
    return float(match[1]) * _UNITS[match[2]]


_OPTIONS = (
    click.option("--name", help="Only runs of this experiment."),
    click.option("--group", metavar="NAME", help="Only runs of this group."),
    click.option(
        "--status", type=click.Choice(STATUSES), multiple=True, help="Only runs with this status."
    ),
    click.option("--since", type=_parse_age, metavar="12h", help="Only runs submitted since then."),
    click.option(
        "--older-than", type=_parse_age, metavar="30d", help="Only runs submitted longer ago."
    ),
    click.option(
        "--where",
        multiple=True,
        metavar="PATH=VALUE",
        help="Only runs whose experiment has this value; can be repeated.",
    ),
)


def filter_options(command: Command) -> Command:
    """Adds the options that `select_runs` takes."""
    return reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), command)


def select_runs(
    registry: Registry,
    *,
    name: str | None = None,
    group: str | None = None,
    status: Sequence[str] = (),
    since: float | None = None,
    older_than: float | None = None,
    where: Sequence[str] = (),
    limit: int | None = None,
) -> tuple[list[RunRecord], int]:
    """Returns the runs that meet every condition, newest first, and how many `limit` leaves out.

    Raises:
        SpecError: there is no such group, or no run has such a value.
    """
    if group is not None:
        list_group_runs(registry, group)
    now = time.time()
    wanted = RunFilter(
        name=name,
        group=group,
        statuses=status,
        created_from=None if since is None else now - since,
        created_before=None if older_than is None else now - older_than,
    )
    found = registry.runs(limit=None if where else limit, **wanted)
    for condition in where:
        found = list(_select_by_value(found, condition))
    count = len(found) if where or limit is None else registry.count_runs(**wanted)
    return found[:limit], count - len(found[:limit])


def _select_by_value(runs: Sequence[RunRecord], condition: str) -> Iterator[RunRecord]:
    from rlx.spec.reading import did_you_mean, list_leaf_values, parse_yaml_document

    path, equals, text = condition.partition("=")
    if not equals or not path:
        raise SpecError(f"--where {escape_unprintable(condition)}: write PATH=VALUE")
    wanted = parse_yaml_document(text, "--where").tree
    values = {run.id: dict(list_leaf_values(run.settings)) for run in runs}
    if runs and not any(path in own for own in values.values()):
        near = did_you_mean(path, {known: None for own in values.values() for known in own})
        hint = f"; did you mean '{near}'?" if near else ""
        raise SpecError(f"--where: no run has a value {escape_unprintable(path)!r}{hint}")
    return (run for run in runs if path in values[run.id] and values[run.id][path] == wanted)


@click.command()
@filter_options
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help=f"Maximum number of runs, newest first; {RUNS_LISTED} by default, with --json every run.",
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
        limit = RUNS_LISTED
    with open_registry(url) as registry:
        found, others = select_runs(registry, **filters, limit=None if whole else limit)
        described = describe_runs(registry, [_look_at_job(registry, run) for run in found])
    if as_json:
        return print_json(described)
    columns = {
        "REWARD": [f"{d['reward']:.3f}" if d["reward"] is not None else "" for d in described]
    }
    columns |= {
        name.upper(): [_format_run_figure(d, name) for d in described]
        for name in ("accuracy", "brier", "ece")
    }
    figures = {name: column for name, column in columns.items() if any(column)}
    rows = [
        (
            d["run"],
            escape_unprintable(d["name"]),
            str(d["seed"]),
            d["status"],
            f"{d['step']}/{d['steps'] or '?'}",
            *(column[number] for column in figures.values()),
            _format_run_age(d["created"]),
        )
        for number, d in enumerate(described)
    ]
    _print_run_table(rows, tuple(figures), [d["groups"] for d in described])
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


def _print_run_table(
    rows: Sequence[tuple[str, ...]], figures: Sequence[str], groups: Sequence[Sequence[str]]
) -> None:
    """Prints runs with some figures, and their groups: in a column, or in a table below."""
    from rich.table import Column

    from rlx.cli.console import UNLIMITED_WIDTH, build_table, open_console

    console = open_console()
    heads = ("NAME", "SEED", "STATUS", "STEP", *figures, "AGE")

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
        free = console.options.update(width=UNLIMITED_WIDTH)
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
@click.option("--values", is_flag=True, help="Print its experiment, each value with its origin.")
@click.option("--pictures", is_flag=True, help="Draw plots of what is recorded into its folder.")
@json_option
@registry_option
def status(run: str, values: bool, pictures: bool, as_json: bool, url: str) -> int | None:
    """Show how RUN is doing, or how it went; RUN is an id, a number or `latest`.

    The plots of --pictures show calibration, curves and probes. They replace
    earlier ones, and those of a run that has ended are sent to its trackers too.
    """
    if pictures:
        return _draw_pictures(run, url)
    with open_registry(url) as registry:
        found = _look_at_job(registry, registry.run(run))
        if values:
            from rlx.cli.validate import collect_run_values, show_values

            show_values(collect_run_values(found), as_json=as_json)
            return None
        (described,) = describe_runs(registry, [found])
        if as_json:
            print_json(described)
            return None
        if found.status == "finished":
            from rlx.cli.console import open_console
            from rlx.cli.tables import show_run_summary

            show_run_summary(registry, found, open_console())
            return None
        events = registry.results.events(found.id)
    from rlx.launch import BROKEN_OFF, is_abandoned, is_half_made
    from rlx.progress import read_progress

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
    if is_idle(idle := described["steps_without_gradient"], found.step):
        last = f"the last {idle} of {found.step} steps"
        lines.append(f"warning  no gradient in {last}: see `rlx samples {found.id}`")
    lines += [f"event    {e.kind}: {e.message}" for e in events[-3:]]
    if found.directory is not None:
        lines.append(f"log      {os.path.relpath(RunFolder(Path(found.directory)).log)}")
    print_text("\n".join(escape_unprintable(line) for line in lines))
    return None


def _draw_pictures(ref: str, url: str) -> int:
    """Draws the plots of a run; returns 1 if it has nothing to draw yet."""
    from rlx.api import open_run

    run = open_run(ref, registry=url)
    drawn = run.plot().files
    for path in drawn:
        print_text(escape_unprintable(os.path.relpath(path)))
    if not drawn:
        print_text(f"{run.id} has no records to draw yet", err=True)
    return 0 if drawn else 1


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


_MAIN = ("accuracy", "brier", "ece", "auroc", "n", "problems")
_METRICS = (
    *_MAIN,
    "brier_recalibrated",
    "ece_debiased",
    "auroc_one_bit",
    "stratum_brier",
    "stratum_auroc",
    "within_auroc",
    "alike_share",
    "unparsable",
    "by_stratum",
    "rewards",
)


def describe_runs(registry: Registry, runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Returns runs as JSON values, with as many queries for many as for one."""
    ids = [run.id for run in runs]
    evaluations = registry.queries.evaluation_figures(ids)
    failures = registry.queries.failures(ids)
    groups, idle = registry.queries.groups(ids), registry.queries.idle_steps(ids)
    scores = registry.queries.last_values(ids, [SCORE])
    return [
        {
            "run": run.id,
            "name": run.name,
            "status": run.effective_status,
            "reason": run.reason,
            "exit_code": choose_run_exit_code(run, failures),
            "step": run.step,
            "steps": run.steps_total,
            "phase": run.phase,
            "steps_without_gradient": idle[run.id],
            "reward": scores[run.id].get(SCORE, (0, None))[1],
            "seed": run.seed,
            "groups": groups[run.id],
            "spec_digest": run.digest,
            "attempt": run.attempt,
            "created": run.created,
            "started": run.started,
            "ended": run.ended,
            "directory": run.directory,
            "mlflow_run_id": run.mlflow_run_id,
            "evaluation": _select_held_out_figures(evaluations[run.id]),
            "suites": _collect_suite_figures(evaluations[run.id]),
        }
        for run in runs
    ]


def _select_held_out_figures(evaluations: Sequence[EvaluationFigures]) -> dict[str, dict[str, Any]]:
    """The figures of a run's held-out set before and after training."""
    found = {e.label: e.metrics for e in evaluations if e.suite == "held_out"}
    return {
        label: {
            name: found[label].get(name)
            for name in _METRICS
            if name in _MAIN or name in found[label]
        }
        for label in ("before", "after")
        if label in found
    }


def _collect_suite_figures(evaluations: Sequence[EvaluationFigures]) -> dict[str, dict[str, Any]]:
    """The main figures of the last evaluation of each label, by held-out set and label."""
    suites: dict[str, dict[str, Any]] = {}
    for e in evaluations:
        if not e.suite.startswith("probe/"):
            values = {k: e.metrics.get(k) for k in ("n", "accuracy", "rewards", "environment")}
            figures = {k: v for k, v in values.items() if v is not None}
            suites.setdefault(e.suite, {})[e.label] = figures
    return suites


@click.command("rm")
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@click.option("--rollouts", is_flag=True, help="Remove only stored rollouts and their index.")
@click.option("--checkpoints", is_flag=True, help="Remove only checkpoints; the model stays.")
@click.option("-n", "--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@filter_options
@registry_option
def remove(
    runs: tuple[str, ...],
    rollouts: bool,
    checkpoints: bool,
    dry_run: bool,
    yes: bool,
    url: str,
    **filters: Any,
) -> None:
    """Remove each RUN, or all ended runs that the filters select: files, records, trackers' copies.

    Everything that will be removed is listed first, with its size. MLflow runs go to MLflow's
    trash; `mlflow gc` empties it. A run that has not ended is refused.

    Exit codes: 0 removed, or nothing to remove; 2 a run has not ended, or was not confirmed.
    """
    filtered = any(value for value in filters.values())
    if bool(runs) == filtered:
        raise SpecError("name the runs, or select them by a filter such as --older-than 30d")
    with open_registry(url) as reading:
        if runs:
            for group in (name for name in runs if reading.runs(group=name, limit=1)):
                raise SpecError(f"{group} is a group: `rlx rm --group {group}` removes its runs")
            found = list({run.id: run for run in map(reading.run, runs)}.values())
        else:
            found, _ = select_runs(reading, **filters)
            found = [run for run in found if run.effective_status in ENDED]
    plans = [plan_removal(run, rollouts=rollouts, checkpoints=checkpoints) for run in found]
    plans = [plan for plan in plans if plan.whole or plan.files]
    if not plans:
        print_text("nothing to remove")
        return
    _show_plans(plans)
    total = format_disk_space(sum(plan.bytes for plan in plans))
    count = f"{len(plans)} run{'s' if len(plans) > 1 else ''}"
    if dry_run:
        print_text(f"would remove {total} of {count}")
        return
    if not yes:
        if not sys.stdin.isatty():
            raise SpecError("nothing was removed: add --yes where nobody can be asked")
        if not click.confirm(f"remove {total} of {count}?"):
            raise SpecError("nothing was removed")
    with open_registry(url, read_only=False) as registry:
        for plan in plans:
            try:
                remove_run_data(registry, plan)
            except OSError as error:
                raise EnvironmentFault(
                    f"{plan.run.id}: {error.filename} cannot be removed: {error.strerror}"
                ) from error
    print_text(f"removed {total} of {count}")


def _show_plans(plans: Sequence[Removal]) -> None:
    from rich.table import Column

    from rlx.cli.console import print_table

    rows = []
    for plan in plans:
        parts = [escape_unprintable(format_path(path)) for path in plan.files]
        parts += [f"MLflow run {plan.mlflow}"] if plan.mlflow else []
        parts += [escape_unprintable(f"in {kind}") for kind in plan.trackers if kind != "mlflow"]
        head = (plan.run.id, escape_unprintable(plan.run.name), plan.run.effective_status)
        rows.append((*head, format_disk_space(plan.bytes), "\n".join(parts or ["records"])))
    run = Column("RUN", no_wrap=True)
    print_table(run, "NAME", "STATUS", "SIZE", "WHAT", rows=rows)
