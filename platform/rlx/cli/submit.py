"""`rlx submit` and `rlx stop`: start and stop runs."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

import click

from rlx.cli.completion import complete_run
from rlx.cli.options import overrides_option, registry_option
from rlx.cli.output import print_text
from rlx.cli.text import print_warnings
from rlx.errors import SpecError
from rlx.importing import speed_up_imports
from rlx.launch import (
    delay_interrupts,
    describe_new_run,
    find_finished_runs,
    is_job,
    locate_run_folder,
    open_registry,
    read_job_id,
    registry_url,
    start_experiment,
    stop_run,
)
from rlx.plan import check_file, run_preflight_checks
from rlx.spec.reading import LoadedSpec, label_refusal
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

__all__ = ["stop", "submit"]


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
@click.option("--queue", is_flag=True, help="Leave the run to an `rlx worker`, and return.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the run's id.")
@click.option("--no-rehearsal", is_flag=True, help="Skip the trial on synthetic rollouts.")
@click.option("--seeds", metavar="0..4", help="Submit a run per seed.")
@click.option("--grid", multiple=True, metavar="PATH=A,B", help="Submit a run per combination.")
@click.option("--group", metavar="NAME", help="Name of the group of runs.")
@click.option(
    "--at-once",
    type=click.IntRange(1),
    help="Runs of the group at a time; by default 1, or as many as a Ray cluster can hold.",
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
    seeds: str | None,
    grid: tuple[str, ...],
    group: str | None,
    at_once: int | None,
) -> int:
    """Check SPEC, record a run, start it in the background, and follow it.

    The check includes a rehearsal: the short trial of `rlx plan` on synthetic rollouts. An
    experiment in which it finds an error is not submitted.

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
        from rlx.cli.submit_group import submit_many

        if again or detach or quiet:
            raise SpecError(
                "--again, --detach and --quiet are for single runs; a group has --queue"
            )
        return submit_many(
            spec,
            overrides,
            seeds,
            grid,
            group=group,
            at_once=at_once,
            returns=queue,
            rehearse=not no_rehearsal,
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
            run, created = start_experiment(registry, read, plugins, again=again, queue=queue)
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
    where = os.path.relpath(locate_run_folder(run).root)
    look = f"rlx logs -f {run.id}   ·   rlx status {run.id}   ·   Ctrl-C detaches"
    if run.status == "queued" and not is_job(run):
        look = f"rlx worker, here or on a machine that shares this folder   ·   rlx stop {run.id}"
    job = read_job_id(locate_run_folder(run))
    print_text(
        f"✓ {run.name}  seed {run.seed}  spec {run.digest}\n"
        f"  rewards {rewards}\n"
        f"  run     {run.id}  ({run.steps_total} steps)\n"
        f"  files   {where}\n"
        + (f"  {read.spec.runner.launcher.kind:7} job {job}\n" if job else "")
        + (f"  new     {escape_unprintable(reason)}\n" if reason else "")
        + f"  {'queued ' if 'worker' in look else 'watch  '} {look}"
    )


@click.command()
@click.argument("run", shell_complete=complete_run)
@registry_option
def stop(run: str, url: str) -> None:
    """Stop RUN between two steps, with a checkpoint; repeat the command to stop it immediately.

    Its records stay, and `rlx resume` continues from its newest checkpoint.
    """
    with open_registry(url) as reading:  # read-only: creates no registry
        run_id = reading.run(run).id
    with open_registry(url, read_only=False) as registry:
        stop_run(registry, run_id, report=print_text)
