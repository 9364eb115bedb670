"""`rlx submit` and `rlx stop`: start and stop runs."""

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click

from rlx.checks import check_file, run_preflight_checks
from rlx.cli.output import print_text
from rlx.cli.registry import (
    BROKEN_OFF,
    KILLED,
    end_orphaned_run,
    locate_run_folder,
    open_registry,
    registry_option,
)
from rlx.cli.text import print_warnings
from rlx.errors import RlxError, SpecError
from rlx.launch import (
    cancel_slurm_job,
    is_abandoned,
    launch_run,
    on_slurm,
    read_job_id,
    reconcile_slurm_run,
    registry_url,
    this_machine,
)
from rlx.launch import submit_run as record
from rlx.spec import SlurmLauncherSpec
from rlx.spec.reading import LoadedSpec
from rlx_registry import ENDED, Registry, RunRecord

__all__ = ["stop", "submit"]


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Override a value; can be repeated.",
)
@click.option(
    "--from-checkpoint",
    metavar="RUN@STEP",
    help="Start from another run's checkpoint; RUN@latest is its newest.",
)
@click.option("--again", is_flag=True, help="Run even if the same spec and seed already ran.")
@click.option("-d", "--detach", is_flag=True, help="Return once the run has started.")
@click.option("--queue", is_flag=True, help="Leave the run to an `rlx worker`, and return.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the run's id.")
@click.option("--seeds", metavar="0..4", help="Submit a run per seed.")
@click.option("--grid", multiple=True, metavar="PATH=A,B", help="Submit a run per combination.")
@click.option("--group", metavar="NAME", help="Name of the group of runs.")
@click.option(
    "--at-once",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs of the group at a time.",
)
def submit(
    spec: Path,
    overrides: tuple[str, ...],
    from_checkpoint: str | None,
    again: bool,
    detach: bool,
    queue: bool,
    quiet: bool,
    seeds: str | None,
    grid: tuple[str, ...],
    group: str | None,
    at_once: int,
) -> int:
    """Check SPEC, record a run, start it in the background, and follow it.

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
            spec, overrides, seeds, grid, group=group, at_once=at_once, returns=queue
        )
    if group is not None:
        raise SpecError("--group names the runs of --seeds or --grid: add one of them")
    return _submit_one(spec, overrides, again=again, detach=detach, queue=queue, quiet=quiet)


def _submit_one(
    spec: Path,
    overrides: tuple[str, ...],
    *,
    again: bool,
    detach: bool,
    queue: bool,
    quiet: bool,
) -> int:
    read, plugins = check_file(spec, overrides)
    url = registry_url(read)
    job = isinstance(read.spec.runner.launcher, SlurmLauncherSpec)
    waits = queue or job
    print_warnings(plugins.warnings + run_preflight_checks(read, plugins, elsewhere=waits))
    run, created = None, False
    try:
        with open_registry(url, read_only=False) as registry, _delay_interrupts():
            run, created = record(registry, read, plugins, again=again, queue=waits)
            if not created and _is_over(registry, run):
                run, created = record(registry, read, plugins, again=again, queue=waits)
            if created and (job or not queue):
                launch_run(registry, run, url)
        if quiet:
            print_text(run.id)
        elif created:
            _print_started_run(run, read)
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


def _is_over(registry: Registry, run: RunRecord) -> bool:
    """Returns whether a run has ended; records it as lost if its supervisor died silently."""
    run = reconcile_slurm_run(registry, run)
    if run.status in ("failed", "stopped", "lost"):
        return True
    reason = BROKEN_OFF if run.status == "queued" else KILLED
    return is_abandoned(run) and end_orphaned_run(registry, run, "lost", reason)


@contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Delays interrupts to the end of the block, so that a recorded run is also started."""
    put_off: list[int] = []

    def remember_signal(number: int, _: FrameType | None) -> None:
        put_off.append(number)

    before = {
        number: signal.signal(number, remember_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in put_off:
        signal.raise_signal(late)


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


def _print_started_run(run: RunRecord, read: LoadedSpec) -> None:
    rewards = ", ".join(
        f"{name}×{use.weight:g}" if not name.startswith("_") else name
        for name, use in (*read.spec.rewards.turn.items(), *read.spec.rewards.global_.items())
    )
    where = os.path.relpath(locate_run_folder(run).root)
    look = f"rlx logs -f {run.id}   ·   rlx status {run.id}   ·   Ctrl-C detaches"
    if run.status == "queued" and not on_slurm(run):
        look = f"rlx worker, here or on a machine that shares this folder   ·   rlx stop {run.id}"
    job = read_job_id(locate_run_folder(run))
    print_text(
        f"✓ {run.name}  seed {run.seed}  spec {run.digest}  rewards: {rewards}\n"
        f"  run     {run.id}  ({run.steps_total} steps)\n"
        f"  files   {where}\n"
        + (f"  slurm   job {job}\n" if job else "")
        + f"  {'queued ' if 'worker' in look else 'watch  '} {look}"
    )


@click.command()
@click.argument("run")
@registry_option
def stop(run: str, url: str) -> None:
    """Stop RUN between two steps, with a checkpoint; repeat the command to stop it immediately.

    Its records stay, and `rlx resume` continues from its newest checkpoint.
    """
    with open_registry(url) as reading:  # read-only: creates no registry
        run_id = reading.run(run).id
    with open_registry(url, read_only=False) as registry:
        found = reconcile_slurm_run(registry, registry.run(run_id))
        if found.status in ENDED and found.status != "lost":
            raise SpecError(f"{found.id} is not running: it is {found.status}")
        if found.status == "running" and not is_abandoned(found):
            _request_run_stop(registry, found)
            return
        # A supervisor that has not begun yet sees the changed status and exits.
        why = KILLED if found.status in ("running", "lost") else "it had not begun"
        if not end_orphaned_run(registry, found, "stopped", why):
            raise RlxError(f"{found.id} has just started: try again")
        if found.directory is not None:
            cancel_slurm_job(locate_run_folder(found))
        print_text(f"{found.id}: {why}; marked as stopped", err=True)


def _request_run_stop(registry: Registry, run: RunRecord) -> None:
    """Leaves a request for the run's supervisor; on this machine a signal delivers it at once."""
    again = run.request is not None
    registry.leave_request(run.id, "kill" if again else "stop")
    if run.host in (None, this_machine()) and run.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGTERM)
    if again:
        print_text(f"{run.id}: asked to stop immediately, without a checkpoint")
    else:
        print_text(f"{run.id}: asked to stop (repeat to stop it immediately)")
