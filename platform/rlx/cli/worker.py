"""`rlx worker`: runs what waits in the queue, and what others have left behind."""

import time
from collections.abc import Iterator
from pathlib import Path

import click

from rlx.cli.registry import folder_of, open_registry, registry_option
from rlx.errors import EnvironmentFault
from rlx.run.paths import RunFolder, tracking_url
from rlx.run.processes import is_abandoned, is_supervisor, this_machine
from rlx.run.slots import wanted_devices
from rlx.run.slurm import is_for_slurm
from rlx.run.takeover import take_up
from rlx.spec import ExperimentSpec
from rlx_registry import Registry, RunRecord

__all__ = ["worker"]

LOOK = 1.0
"""Seconds between two looks at the queue."""


@click.command()
@registry_option
@click.option("--runs", "limit", default=1, type=click.IntRange(1), help="Runs at once.")
@click.option("--once", is_flag=True, help="End when nothing is left to do.")
def worker(url: str, limit: int, once: bool) -> None:
    """Run what waits in the queue, oldest first, and finish runs that are lost.

    Any number of workers may share a registry, on any number of machines that see the runs'
    folders. A worker that ends, however it ends, ends no run: each has a supervisor of its own.
    """
    url = tracking_url(url)
    with open_registry(url, read_only=False) as registry:
        queue = _Queue(registry)
        mine: dict[str, int] = {}
        while True:
            mine = {run: pid for run, pid in mine.items() if is_supervisor(pid, run)}
            taken = None
            if len(mine) < limit:
                taken = next(queue.fitting(set(mine)), None)
            if taken is not None:
                pid = take_up(registry, taken, url, _reason(taken))
                if pid is not None:
                    mine[taken.id] = pid
                    click.echo(f"{taken.id} {taken.name}  seed {taken.seed}: {_reason(taken)}")
                continue
            if once and not mine:
                return
            time.sleep(LOOK)


def _reason(run: RunRecord) -> str:
    return "taken from the queue" if run.status == "queued" else "taken up by a worker"


def _spec(run: RunRecord) -> ExperimentSpec:
    """The experiment as the run's folder has it, which `rlx resume --set` may have changed."""
    return ExperimentSpec.model_validate_json(folder_of(run).resolved.read_text())


class _Queue:
    """What there is to do, oldest first; says once why something is left alone."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._told: set[str] = set()

    def fitting(self, mine: set[str]) -> Iterator[RunRecord]:
        """Runs that this machine could begin now.

        One that waits for devices lets none pass that wants some as well.
        """
        here = this_machine()
        held = {device.name for device in self._registry.devices(here)}
        full = False
        for run in self._waiting(mine):
            try:
                wanted = wanted_devices(_spec(run).runner)
            except EnvironmentFault as error:
                self._tell(run, str(error))
                continue
            if wanted is None or (not full and len(set(wanted.names) - held) >= wanted.count):
                yield run
            else:
                full = True

    def _waiting(self, mine: set[str]) -> Iterator[RunRecord]:
        found = [
            run
            for status in ("lost", "running", "submitted", "queued")
            for run in self._registry.runs(status=status)
            if run.id not in mine and (status == "queued" or status == "lost" or is_abandoned(run))
        ]
        for run in sorted(found, key=lambda run: run.created):
            if run.directory is None or not RunFolder(Path(run.directory)).resolved.exists():
                self._tell(run, "its folder is not on this machine")
            elif is_for_slurm(folder_of(run)):
                self._tell(run, "it is a job of Slurm")
            elif run.status != "queued" and run.attempt >= _spec(run).runner.max_attempts:
                self._tell(run, f"it is lost after {run.attempt} attempts")
            else:
                yield run

    def _tell(self, run: RunRecord, why: str) -> None:
        if run.id not in self._told:
            self._told.add(run.id)
            click.echo(f"{run.id} is left alone: {why}", err=True)
