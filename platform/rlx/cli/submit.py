"""`rlx submit`: submits an experiment, or a group of runs over seeds and values."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlx.cli.groups import check_group, read_run_group, record_group, require_group_name
from rlx.cli.output import print_text, print_warnings
from rlx.cli.verb_group import overrides_option
from rlx.errors import EnvironmentFault, SpecError
from rlx.importing import speed_up_imports
from rlx.launch import (
    delay_interrupts,
    describe_new_run,
    find_finished_runs,
    find_runs,
    is_job,
    locate_run_folder,
    open_registry,
    read_job_id,
    registry_url,
    run_queue,
    start_experiment,
    start_job,
)
from rlx.plan import check_file, run_preflight_checks
from rlx.spec.reading import LoadedSpec, label_refusal
from rlx.text import escape_unprintable
from rlx_registry import Registry, RunRecord

if TYPE_CHECKING:
    from rlx.cli.follow import GroupView


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@overrides_option()
@click.option(
    "--from-checkpoint",
    metavar="RUN@STEP",
    help="Start from another run's checkpoint; RUN@latest is its newest.",
)
@click.option("--again", is_flag=True, help="Run even if the same spec and seed already ran.")
@click.option("-d", "--detach", is_flag=True, help="Return once the run has started.")
@click.option("--queue", is_flag=True, help="Only record the run; `rlx resume` starts it.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the run's id.")
@click.option("--no-rehearsal", is_flag=True, help="Skip the trial on synthetic rollouts.")
@click.option("--anyway", is_flag=True, help="Train even if the first answers teach nothing.")
@click.option("--seeds", metavar="0..4", help="Submit a run per seed.")
@click.option("--grid", multiple=True, metavar="PATH=A,B", help="Submit a run per combination.")
@click.option("--group", metavar="NAME", help="Name of the group of runs.")
@click.option(
    "--at-once",
    type=click.IntRange(1),
    default=1,
    help="Runs of the group at a time.",
)
@label_refusal("submitted")
def submit(
    spec: Path,
    overrides: tuple[str, ...],
    from_checkpoint: str | None,
    again: bool,
    detach: bool,
    queue: bool,
    quiet: bool,
    no_rehearsal: bool,
    anyway: bool,
    seeds: str | None,
    grid: tuple[str, ...],
    group: str | None,
    at_once: int,
) -> int:
    """Check SPEC, record a run, start it in the background, and follow it.

    The check includes a rehearsal: the short trial of `rlx plan` on synthetic rollouts. An
    experiment in which it finds an error is not submitted.

    A pretrained model first answers a few problems. If no answer could teach it anything, the run
    ends there and says what to change, unless --anyway is given.

    The run waits while other runs hold the devices it needs on this machine. Ctrl-C stops
    following, not the run. The exit code is the run's: 0 if it finished, 1 if it failed, 3 if a
    plugin caused the failure, 4 if this machine did.

    With --seeds or --grid, a group of runs is submitted. All runs are checked before the first is
    recorded, listed before the first starts, and run as devices become free. Repeat the command to
    run what is missing. `rlx compare` and `rlx runs --group` take the name of the group.
    """
    if from_checkpoint is not None:
        overrides += (f"from_checkpoint={from_checkpoint}",)
    if seeds is not None or grid:
        if again or detach or quiet:
            raise SpecError(
                "--again, --detach and --quiet are for single runs; a group has --queue"
            )
        return _submit_group(
            spec,
            overrides,
            seeds,
            grid,
            group=group,
            at_once=at_once,
            returns=queue,
            rehearse=not no_rehearsal,
            anyway=anyway,
        )
    if group is not None:
        raise SpecError("--group names the runs of --seeds or --grid: add one of them")
    return _submit_one(
        spec,
        overrides,
        again=again,
        detach=detach,
        queue=queue,
        quiet=quiet,
        rehearse=not no_rehearsal,
        anyway=anyway,
    )


def _submit_one(
    spec: Path,
    overrides: tuple[str, ...],
    *,
    again: bool,
    detach: bool,
    queue: bool,
    quiet: bool,
    rehearse: bool,
    anyway: bool,
) -> int:
    read, plugins = check_file(spec, overrides)
    url = registry_url(read)
    (finished,) = [None] if again else find_finished_runs(url, [(read, plugins)])
    if finished is not None:
        print_text(finished.id) if quiet else _print_nothing_to_do(finished, spec, overrides)
        return 0
    waits = queue or read.spec.runner.launcher.submits_jobs
    print_warnings(plugins.warnings + run_preflight_checks(read, plugins, elsewhere=waits))
    if rehearse:
        with speed_up_imports():
            from rlx.plan import run_rehearsal_checks  # imports torch

        (warnings,) = run_rehearsal_checks([(read, plugins)], elsewhere=waits)
        print_warnings(warnings)
        plugins = replace(plugins, warnings=plugins.warnings + warnings)
    run, created, reason = None, False, None
    try:
        with open_registry(url, read_only=False) as registry, delay_interrupts():
            run, created = start_experiment(
                registry, read, plugins, again=again, queue=queue, anyway=anyway
            )
            reason = describe_new_run(registry, run) if created else None
        if quiet:
            print_text(run.id)
        elif created:
            _print_started_run(run, read, reason)
        else:
            _print_nothing_to_do(run, spec, overrides)
        if detach or queue or not created:
            return 0
        from rlx.cli.follow import follow_run

        return follow_run(run.id, url, quiet=quiet)
    except KeyboardInterrupt:
        if run is None or not created:
            raise
        look = f"rlx logs -f {run.id}  ·  rlx stop {run.id}"
        print_text(f"\ndetached; {run.id} keeps running.  {look}", err=True)
        return 130


def _print_nothing_to_do(run: RunRecord, spec: Path, overrides: tuple[str, ...]) -> None:
    state = {
        "finished": "already finished",
        "running": "is running",
        "submitted": "is starting",
        "queued": "is queued",
    }
    kept = [o for o in overrides if not o.startswith("seed=")]
    seeded, same = (
        shlex.join(["rlx", "submit", str(spec), *(w for o in some for w in ("--set", o))])
        for some in (kept, overrides)
    )
    print_text(
        f"= nothing to do: spec {run.digest}, seed {run.seed} "
        f"{state.get(run.status, run.status)} as {run.id}\n"
        f"  how it went:  rlx status {run.id}\n"
        f"  run it again: {same} --again\n"
        f"  another seed: {seeded} --set seed={run.seed + 1}"
    )


def _print_started_run(run: RunRecord, read: LoadedSpec, reason: str | None) -> None:
    rewards = ", ".join(
        f"{name}×{use.weight:g}" if not name.startswith("_") else name
        for name, use in (*read.spec.rewards.turn.items(), *read.spec.rewards.global_.items())
    )
    where, teacher = os.path.relpath(locate_run_folder(run).root), read.spec.model.reference
    look = f"rlx logs -f {run.id}   ·   rlx status {run.id}   ·   Ctrl-C detaches"
    waits = run.status == "queued" and not is_job(run)
    if waits:
        look = f"rlx resume {run.id}   ·   rlx stop {run.id}"
    job = read_job_id(locate_run_folder(run))
    print_text(
        f"✓ {run.name}  seed {run.seed}  spec {run.digest}\n"
        f"  rewards {rewards or 'none'}\n"
        + (f"  teacher {escape_unprintable(teacher.path)}\n" if teacher else "")
        + f"  run     {run.id}  ({run.steps_total} steps)\n"
        f"  files   {where}\n"
        + (f"  {read.spec.runner.launcher.kind:7} job {job}\n" if job else "")
        + (f"  new     {escape_unprintable(reason)}\n" if reason else "")
        + f"  {'queued ' if waits else 'watch  '} {look}"
    )


def _submit_group(
    spec: Path,
    overrides: Sequence[str],
    seeds: str | None,
    grid: Sequence[str],
    *,
    group: str | None,
    at_once: int,
    returns: bool,
    rehearse: bool,
    anyway: bool,
) -> int:
    """Records the missing runs of a group, submits those that are jobs, shows all, and runs them.

    Args:
        spec: file of the experiment.
        overrides: overrides of every run.
        seeds: text for `parse_seeds`; None takes the experiment's own seed.
        grid: texts for `parse_grid`.
        group: name of the group; None builds one from the experiment's name and what varies.
        at_once: number of runs at a time. Jobs are submitted at once.
        returns: only record the runs, and submit those that are jobs.
        rehearse: as of `check_group`.
        anyway: as of `submit_run`.

    Returns:
        0 if every run has finished, or was only recorded; else 1.

    Raises:
        SpecError: the options or the name of the group are invalid, or the name is taken.
        InvalidSpec: a member is invalid; nothing is recorded then.
    """
    from rlx.cli.console import open_console
    from rlx.cli.follow import GroupView
    from rlx.cli.tables import describe_mlflow_page

    if group is not None:
        require_group_name(group)
    members = read_run_group(spec, overrides, seeds, grid)
    url = registry_url(members[0].read)
    if not all(find_finished_runs(url, [(one.read, one.plugins) for one in members])):
        members, warnings = check_group(members, elsewhere=returns, rehearse=rehearse)
        print_warnings(warnings)
    with open_registry(url, read_only=False) as registry:
        name, runs = record_group(registry, members, group, anyway=anyway)
        print_text(f"group {name}")
        _submit_jobs(registry, runs, url)
        view = GroupView(registry, name, members, runs)
        ids = list(dict.fromkeys(run.id for run in runs))
        if not returns:
            _follow_runs(registry, url, at_once, ids, view)
        open_console().print(view.build_table())
        if returns:
            return 0
        ended = find_runs(registry, ids)
    print_text(f"compare them:  rlx compare {name}")
    if mlflow := describe_mlflow_page(ended, [name]):
        print_text(f"in MLflow:     {mlflow}")
    return int([run.status for run in ended] != ["finished"] * len(ids))


def _submit_jobs(registry: Registry, runs: Sequence[RunRecord], url: str) -> None:
    """Submits the runs that are jobs and have none; a refusal is reported, and ends it."""
    for run in runs:
        try:
            with delay_interrupts():
                start_job(registry, run, url)
        except EnvironmentFault as fault:  # such as a limit on jobs
            print_text(f"{fault}; repeat the command to submit it and what follows it", err=True)
            return


def _follow_runs(
    registry: Registry, url: str, at_once: int, ids: Sequence[str], view: "GroupView"
) -> None:
    """Runs what is missing, with a line for each change."""
    print_text("Ctrl-C leaves runs running; repeat the command to run what is missing", err=True)
    look = view.print_changes
    run_queue(registry, url, ids, at_once, report=print_text, look=look)
    look()
