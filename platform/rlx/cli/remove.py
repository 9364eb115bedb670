"""`rlx rm`: removes runs that have ended, or their rollouts or checkpoints."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from rlx.cli.completion import complete_run
from rlx.cli.options import registry_option
from rlx.cli.output import print_text
from rlx.cli.run_filters import filter_options, select_runs
from rlx.errors import EnvironmentFault, SpecError
from rlx.home import format_path
from rlx.launch import Removal, format_disk_space, open_registry, plan_removal, remove_run_data
from rlx.text import escape_unprintable
from rlx_registry import ENDED

__all__ = ["remove"]


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
    """Remove each RUN, or all ended runs that the filters select: files, records, MLflow run.

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
        head = (plan.run.id, escape_unprintable(plan.run.name), plan.run.effective_status)
        rows.append((*head, format_disk_space(plan.bytes), "\n".join(parts or ["records"])))
    run = Column("RUN", no_wrap=True)
    print_table(run, "NAME", "STATUS", "SIZE", "WHAT", rows=rows)
