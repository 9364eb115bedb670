"""The commands about recorded runs: `rlx runs`, `status`, `logs` and `rm`."""

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rlx.cli.output import print_json, print_text
from rlx.cli.verb_group import add_options, json_option, registry_option
from rlx.errors import EnvironmentFault, SpecError
from rlx.home import RunFolder, format_path
from rlx.launch import (
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
    EventRecord,
    Registry,
    RunFilter,
    RunRecord,
    is_idle,
)

SCORE = "score/total_score"
"""The mean total score of the latest step's rows, which every run records."""
RUNS_LISTED = 50
"""Runs that a table lists by default."""


def _parse_age(text: str) -> float:
    units = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
    match = re.fullmatch(rf"([0-9]{{1,6}})({'|'.join(units)})", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no age: write 90min, 12h, 30d or 2w")
    return float(match[1]) * units[match[2]]


_filter_options = add_options(
    click.option("--name", help="Only runs of this experiment."),
    click.option("--group", metavar="NAME", help="Only runs of this group."),
    click.option(
        "--status", type=click.Choice(STATUSES), multiple=True, help="Only runs with this status."
    ),
    click.option(
        "--older-than", type=_parse_age, metavar="30d", help="Only runs submitted longer ago."
    ),
)
"""The options that `_build_filter` takes."""


def _build_filter(
    registry: Registry,
    *,
    name: str | None,
    group: str | None,
    status: Sequence[str],
    older_than: float | None,
) -> RunFilter:
    if group is not None:
        list_group_runs(registry, group)
    before = None if older_than is None else time.time() - older_than
    return RunFilter(name=name, group=group, statuses=status, created_before=before)


@click.command()
@_filter_options
@click.option("--all", "whole", is_flag=True, help="List every run, as --json does.")
@json_option
@registry_option
def runs(whole: bool, as_json: bool, url: str, **filters: Any) -> None:
    """List runs, newest first."""
    with open_registry(url) as registry:
        wanted = _build_filter(registry, **filters)
        found = registry.runs(limit=None if whole or as_json else RUNS_LISTED, **wanted)
        others = registry.count_runs(**wanted) - len(found)
        described = describe_runs(registry, [_look_at_job(registry, run) for run in found])
    if as_json:
        return print_json(described)
    print_run_table(described)
    if others:
        text = "1 older run is" if others == 1 else f"{others} older runs are"
        print_text(f"{text} not shown; --all shows every run", err=True)
    return None


def _look_at_job(registry: Registry, run: RunRecord) -> RunRecord:
    """Updates the run from the state of its job, if it has one."""
    if run.directory is None or not RunFolder(Path(run.directory)).job.exists():
        return run
    from rlx.launch import reconcile_job  # imported here: it is slow, and few runs are jobs

    return reconcile_job(registry, run)


def print_run_table(
    found: Sequence[dict[str, Any]], cells: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Prints runs, as `describe_runs` returns them, with the figures that any of them has; `cells`
    are of each run of one group the values in which it differs from others, by path."""
    from rich.table import Column

    from rlx.cli.tables import print_table

    paths = list(dict.fromkeys(path for cell in (cells or {}).values() for path in cell))
    keys = [path.rpartition(".")[2] for path in paths]
    columns = {
        "RUN": [run["run"] for run in found],
        "NAME": [escape_unprintable(run["name"]) for run in found],
        **{
            escape_unprintable(path if keys.count(key) > 1 else key): [
                json.dumps(cells[run["run"]].get(path)) for run in found if cells
            ]
            for path, key in zip(paths, keys, strict=True)
            if key != "seed"
        },
        "SEED": [str(run["seed"]) for run in found],
        "STATUS": [run["status"] for run in found],
        "STEP": [f"{run['step']}/{run['steps'] or '?'}" for run in found],
        "REWARD": ["" if run["reward"] is None else f"{run['reward']:.3f}" for run in found],
        **{
            name.upper(): [format_run_figure(run, name) for run in found]
            for name in ("accuracy", "brier", "ece")
        },
        "AGE": [_format_age(run["created"]) for run in found],
        "GROUP": [" ".join(run["groups"]) if cells is None else "" for run in found],
    }
    shown = {head: column for head, column in columns.items() if any(column)}
    heads = [head for head in shown if head != "RUN"]
    rows = zip(*shown.values(), strict=True)
    print_table(Column("RUN", no_wrap=True), *heads, rows=rows)


def format_run_figure(run: dict[str, Any], name: str) -> str:
    """A metric after training, or the one before training in parentheses."""
    for label, form in (("after", "{:.3f}"), ("before", "({:.3f})")):
        value = run["evaluation"].get(label, {}).get(name)
        if value is not None:
            return form.format(value)
    return ""


def _format_age(created: float) -> str:
    seconds = time.time() - created
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((one for one in units if seconds >= one[0]), units[-1])
    return f"{seconds / size:.0f} {unit}"


@click.command()
@click.argument("run")
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
        from rlx.api import open_run

        opened = open_run(run, registry=url)
        drawn = opened.plot().files
        for path in drawn:
            print_text(escape_unprintable(os.path.relpath(path)))
        if not drawn:
            print_text(f"{opened.id} has no records to draw yet", err=True)
        return 0 if drawn else 1
    with open_registry(url) as registry:
        found = _look_at_job(registry, registry.run(run))
        if values:
            from rlx.cli.validate import collect_run_values, show_values

            show_values(collect_run_values(found), as_json=as_json)
            return None
        (described,) = describe_runs(registry, [found])
        if as_json:
            print_json(described)
        elif found.status == "finished":
            from rlx.cli.run_summary import show_run_summary

            show_run_summary(registry, found)
        else:
            _show_unfinished_run(found, described, registry.results.events(found.id))
    return None


def _show_unfinished_run(
    found: RunRecord, described: Mapping[str, Any], events: Sequence[EventRecord]
) -> None:
    from rlx.launch import BROKEN_OFF, is_abandoned
    from rlx.progress import read_progress

    stage = None
    if found.directory is not None:
        stage = read_progress(RunFolder(Path(found.directory)).progress)
    why = found.reason
    if found.status in ("queued", "submitted") and is_abandoned(found):
        why = f"{BROKEN_OFF}; rlx resume {found.id}"
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
    print_text("\n".join(map(escape_unprintable, lines)))


@click.command()
@click.argument("run", default="latest")
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
        seen = 0
        while True:
            is_over = not follow or registry.run(found.id).effective_status in ENDED
            content = b""
            if log.is_file():
                with log.open("rb") as file:
                    file.seek(seen)
                    content = file.read()
            shown = content.decode(errors="replace").splitlines()
            for line in shown if seen else shown[max(0, len(shown) - lines) :]:
                print_text(escape_unprintable(line))
            seen += len(content)
            if is_over:
                return None
            time.sleep(0.5)


def describe_runs(registry: Registry, runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Describes runs as JSON values, with as many queries for many as for one."""
    ids = [run.id for run in runs]
    suites: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {run: {} for run in ids}
    for run_id, evaluations in registry.queries.evaluation_figures(ids).items():
        for suite, label, metrics in evaluations:
            if not suite.startswith("probe/"):
                suites[run_id].setdefault(suite, {})[label] = metrics
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
            "evaluation": suites[run.id].get("held_out", {}),
            "suites": suites[run.id],
        }
        for run in runs
    ]


@click.command("rm")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--rollouts", is_flag=True, help="Remove only stored rollouts and their index.")
@click.option("--checkpoints", is_flag=True, help="Remove only checkpoints; the model stays.")
@click.option("-n", "--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@_filter_options
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
            found = reading.runs(**_build_filter(reading, **filters))
            found = [run for run in found if run.effective_status in ENDED]
    plans = [plan_removal(run, rollouts=rollouts, checkpoints=checkpoints) for run in found]
    plans = [plan for plan in plans if plan.whole or plan.files]
    if not plans:
        print_text("nothing to remove")
        return
    from rich.table import Column

    from rlx.cli.tables import print_table

    rows = []
    for plan in plans:
        parts = [escape_unprintable(format_path(path)) for path in plan.files]
        parts += [f"MLflow run {plan.mlflow}"] if plan.mlflow else []
        parts += [escape_unprintable(f"in {kind}") for kind in plan.trackers if kind != "mlflow"]
        head = (plan.run.id, escape_unprintable(plan.run.name), plan.run.effective_status)
        rows.append((*head, format_disk_space(plan.bytes), "\n".join(parts or ["records"])))
    print_table(Column("RUN", no_wrap=True), "NAME", "STATUS", "SIZE", "WHAT", rows=rows)
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
