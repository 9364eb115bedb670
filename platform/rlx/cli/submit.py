"""`rlx submit`: submits an experiment, or a group of runs over seeds and values."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from rlx.cli.groups import GroupMember, read_run_group, record_group, require_group_name
from rlx.cli.output import print_report, print_text
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
from rlx.spec.reading import LoadedSpec, format_diagnostic, label_refusal
from rlx.text import escape_unprintable
from rlx_registry import RunRecord


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@overrides_option()
@click.option("--from-checkpoint", metavar="RUN@STEP", help="Checkpoint to start from.")
@click.option("--again", is_flag=True, help="Run even if the same spec and seed already ran.")
@click.option("-d", "--detach", is_flag=True, help="Return once the run has started.")
@click.option("--queue", is_flag=True, help="Only record the run; `rlx resume` starts it.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the run's id.")
@click.option("--no-rehearsal", is_flag=True, help="Skip the trial on synthetic rollouts.")
@click.option("--anyway", is_flag=True, help="Train even if the first answers teach nothing.")
@click.option("--seeds", metavar="0..4", help="Submit a run per seed.")
@click.option("--grid", multiple=True, metavar="PATH=A,B", help="Submit a run per combination.")
@click.option("--group", metavar="NAME", help="Name of the group of runs.")
@click.option("--at-once", type=click.IntRange(1), default=1, help="Runs of the group at a time.")
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
    is_group = seeds is not None or bool(grid)
    if is_group and (again or detach or quiet):
        raise SpecError("--again, --detach and --quiet are for single runs; a group has --queue")
    if group is not None:
        if not is_group:
            raise SpecError("--group names the runs of --seeds or --grid: add one of them")
        require_group_name(group)
    if from_checkpoint is not None:
        overrides += (f"from_checkpoint={from_checkpoint}",)
    members = read_run_group(spec, overrides, seeds, grid)
    experiments = [one.experiment for one in members]
    url = registry_url(experiments[0][0])
    found = [None] if again else find_finished_runs(url, experiments)
    if not is_group and found[0] is not None:
        print_text(found[0].id) if quiet else _print_nothing_to_do(found[0], spec, overrides)
        return 0
    if not all(found):
        with speed_up_imports():
            from rlx.api import check_submission

        elsewhere = queue or (not is_group and experiments[0][0].spec.runner.launcher.submits_jobs)
        experiments, warnings = check_submission(
            experiments, elsewhere=elsewhere, rehearse=not no_rehearsal
        )
        for warning in warnings:
            print_report(format_diagnostic(warning))
    if is_group:
        members = [
            replace(one, experiment=own) for one, own in zip(members, experiments, strict=True)
        ]
        return _submit_group(members, url, group, at_once=at_once, returns=queue, anyway=anyway)
    run, created = None, False
    try:
        with open_registry(url, read_only=False) as registry, delay_interrupts():
            run, created = start_experiment(
                registry, *experiments[0], again=again, queue=queue, anyway=anyway
            )
            reason = describe_new_run(registry, run) if created else None
        if quiet:
            print_text(run.id)
        elif created:
            _print_started_run(run, experiments[0][0], reason)
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
    state = {"finished": "already finished", "submitted": "is starting"}
    kept = [o for o in overrides if not o.startswith("seed=")]
    seeded, same = (
        shlex.join(["rlx", "submit", str(spec), *(w for o in some for w in ("--set", o))])
        for some in (kept, overrides)
    )
    print_text(
        f"= nothing to do: spec {run.digest}, seed {run.seed} "
        f"{state.get(run.status, f'is {run.status}')} as {run.id}\n"
        f"  how it went:  rlx status {run.id}\n"
        f"  run it again: {same} --again\n"
        f"  another seed: {seeded} --set seed={run.seed + 1}"
    )


def _print_started_run(run: RunRecord, read: LoadedSpec, reason: str | None) -> None:
    rewards = ", ".join((*read.spec.rewards.turn, *read.spec.rewards.global_))
    where = os.path.relpath(locate_run_folder(run).root)
    look = f"rlx logs -f {run.id}   ·   rlx status {run.id}   ·   Ctrl-C detaches"
    waits = run.status == "queued" and not is_job(run)
    if waits:
        look = f"rlx resume {run.id}   ·   rlx stop {run.id}"
    job = read_job_id(locate_run_folder(run))
    print_text(
        f"✓ {run.name}  seed {run.seed}  spec {run.digest}\n"
        f"  rewards {rewards or 'none'}\n"
        f"  run     {run.id}  ({run.steps_total} steps)\n"
        f"  files   {where}\n"
        + (f"  {read.spec.runner.launcher.kind:7} job {job}\n" if job else "")
        + (f"  new     {escape_unprintable(reason)}\n" if reason else "")
        + f"  {'queued ' if waits else 'watch  '} {look}"
    )


def _submit_group(
    members: Sequence[GroupMember],
    url: str,
    group: str | None,
    *,
    at_once: int,
    returns: bool,
    anyway: bool,
) -> int:
    """Records the missing runs of a group, submits those that are jobs, shows all, and runs them.

    Args:
        returns: only record the runs, and submit those that are jobs.
    """
    from rlx.cli.follow import GroupView
    from rlx.cli.run_summary import describe_mlflow_page

    with open_registry(url, read_only=False) as registry:
        name, runs = record_group(registry, members, group, anyway=anyway)
        print_text(f"group {name}")
        for run in runs:
            try:
                with delay_interrupts():
                    start_job(registry, run, url)
            except EnvironmentFault as fault:  # such as a limit on jobs
                again = "repeat the command to submit it and what follows it"
                print_text(f"{fault}; {again}", err=True)
                break
        cells = {run.id: member.cell for run, member in zip(runs, members, strict=True)}
        view = GroupView(registry, name, cells)
        if not returns:
            advice = "Ctrl-C leaves runs running; repeat the command to run what is missing"
            print_text(advice, err=True)
            look = view.print_changes
            run_queue(registry, url, list(cells), at_once, report=print_text, look=look)
            view.print_changes()
        view.print_table()
        if returns:
            return 0
        ended = find_runs(registry, list(cells))
    print_text(f"compare them:  rlx compare {name}")
    if mlflow := describe_mlflow_page(ended, [name]):
        print_text(f"in MLflow:     {mlflow}")
    return int([run.status for run in ended] != ["finished"] * len(cells))
