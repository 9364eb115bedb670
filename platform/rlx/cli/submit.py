"""`rlx submit` and `rlx stop`."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from rlx.cli.registry import bury, folder_of, is_supervisor, open_registry, registry_option
from rlx.cli.text import paint
from rlx.discovery import check_file
from rlx.errors import RlxError, SpecError
from rlx.run.launch import failed_unless_started, registry_url, start
from rlx.run.launch import submit as record
from rlx.run.preflight import preflight
from rlx.spec.diagnostic import Diagnostic, render
from rlx.spec.reader import ReadSpec
from rlx_registry import RunRecord

__all__ = ["stop", "submit"]


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a value.")
@click.option("--again", is_flag=True, help="Run it even if the same spec and seed already ran.")
@click.option("-d", "--detach", is_flag=True, help="Return once it has started.")
@click.option("-q", "--quiet", is_flag=True, help="Print the run's id and nothing else.")
def submit(spec: Path, overrides: tuple[str, ...], again: bool, detach: bool, quiet: bool) -> int:
    """Check SPEC, record a run of it, start it apart from this terminal, and follow it.

    Ctrl-C stops the following and not the run. The exit code is the run's: 0 when it finished, 1
    when it failed, 3 or 4 where a plugin or this machine is the reason.
    """
    read, plugins = check_file(spec, overrides)
    url = registry_url(read)
    _warn(plugins.warnings + preflight(read, plugins))
    run, created = None, False
    try:
        with open_registry(url, read_only=False) as registry, _undisturbed():
            run, created = record(registry, read, plugins, again=again)
            if not created and _is_orphan(run) and bury(registry, run, "lost", "supervisor killed"):
                run, created = record(registry, read, plugins, again=again)
            if created:
                with failed_unless_started(registry, run.id):
                    registry.update_run(run.id, pid=start(run, url))
        if quiet:
            click.echo(run.id)
        elif created:
            _say_started(run, read)
        else:
            _say_nothing_to_do(run, spec, overrides)
        if detach or not created:
            return 0
        from rlx.cli.follow import follow

        return follow(run.id, url, quiet=quiet)
    except KeyboardInterrupt:
        if run is None or not created:
            raise
        look = f"rlx logs -f {run.id}  ·  rlx stop {run.id}"
        click.echo(f"\ndetached; {run.id} goes on.  {look}", err=True)
        return 130


def _is_orphan(run: RunRecord) -> bool:
    """Whether a run that counts as running has nobody left to run it."""
    return run.status == "running" and run.pid is not None and not is_supervisor(run.pid, run.id)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts interrupts off until the end of the block: a run is recorded and started, or neither."""
    put_off: list[int] = []

    def remember(number: int, _: FrameType | None) -> None:
        put_off.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in put_off:
        signal.raise_signal(late)


def _warn(warnings: tuple[Diagnostic, ...]) -> None:
    for warning in warnings:
        click.echo(paint(render(warning), sys.stderr), err=True)


def _say_nothing_to_do(run: RunRecord, spec: Path, overrides: tuple[str, ...]) -> None:
    state = {"finished": "already finished", "running": "is running", "submitted": "is starting"}
    kept = [o for o in overrides if not o.startswith("seed=")]
    seeded, same = (
        shlex.join(["rlx", "submit", str(spec), *(w for o in some for w in ("--set", o))])
        for some in (kept, overrides)
    )
    click.echo(
        f"= nothing to do: spec {run.digest}, seed {run.seed} "
        f"{state.get(run.status, run.status)} as {run.id}\n"
        f"  how it went:  rlx status {run.id}\n"
        f"  run it again: {same} --again\n"
        f"  another seed: {seeded} --set seed={run.seed + 1}"
    )


def _say_started(run: RunRecord, read: ReadSpec) -> None:
    rewards = ", ".join(
        f"{name}×{use.weight:g}" if not name.startswith("_") else name
        for name, use in (*read.spec.rewards.turn.items(), *read.spec.rewards.global_.items())
    )
    where = os.path.relpath(folder_of(run).root)
    click.echo(
        f"✓ {run.name}  seed {run.seed}  spec {run.digest}  rewards: {rewards}\n"
        f"  run     {run.id}  ({run.steps_total} steps)\n"
        f"  files   {where}\n"
        f"  watch   rlx logs -f {run.id}   ·   rlx status {run.id}   ·   Ctrl-C detaches"
    )


@click.command()
@click.argument("run")
@registry_option
def stop(run: str, url: str) -> None:
    """Stop RUN; its records stay."""
    with open_registry(url) as reading:  # makes no registry where there is none
        run_id = reading.run(run).id
    with open_registry(url, read_only=False) as registry:
        found = registry.run(run_id)
        if found.status not in ("submitted", "running"):
            raise SpecError(f"{found.id} is not running: it is {found.status}")
        begun = found.status == "running"
        if begun and found.pid is not None and is_supervisor(found.pid, found.id):
            os.kill(found.pid, signal.SIGTERM)
            click.echo(f"{found.id}: asked to stop")
            return
        # A supervisor that has not begun finds the run taken from it, and leaves.
        why = "its supervisor was gone" if begun else "it had not begun"
        if not bury(registry, found, "stopped", why):
            raise RlxError(f"{found.id} has begun just now: try again")
        click.echo(f"{found.id}: {why}; marked as stopped", file=sys.stderr)
