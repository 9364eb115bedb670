"""`rlx resume` and `rlx verify-resume`."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import psutil

from rlx.cli.registry import folder_of, is_supervisor, open_registry, registry_option
from rlx.errors import RlxError, SpecError
from rlx.run.compare import differences
from rlx.run.disk import hold_reserve
from rlx.run.launch import failed_unless_started, start
from rlx.run.paths import tracking_url
from rlx.run.processes import live_ranks
from rlx.run.progress import read_progress
from rlx_registry import Registry, RunRecord

__all__ = ["resume", "verify_resume"]

RESUMABLE = ("failed", "stopped", "lost")
VICTIMS = ("rank", "supervisor", "worker")


@click.command()
@click.argument("run")
@registry_option
@click.option("-d", "--detach", is_flag=True, help="Return once it has started.")
@click.option("-q", "--quiet", is_flag=True, help="Print the run's id and nothing else.")
def resume(run: str, url: str, detach: bool, quiet: bool) -> int:
    """Go on with RUN, which failed, was stopped or is lost, from its newest checkpoint.

    Without a checkpoint it begins anew; what was recorded is recorded again, alike.
    """
    url = tracking_url(url)
    with open_registry(url) as reading:
        found = reading.run(run)
    with open_registry(url, read_only=False) as registry:
        _take_up(registry, found)
        with failed_unless_started(registry, found.id):
            hold_reserve(folder_of(found).reserve)
            registry.update_run(found.id, pid=start(found, url))
    click.echo(found.id if quiet else f"✓ {found.id} goes on")
    if detach:
        return 0
    from rlx.cli.follow import follow

    return follow(found.id, url, quiet=quiet)


def _take_up(registry: Registry, run: RunRecord) -> None:
    """Has a run wait for its supervisor again.

    Raises:
        SpecError: it has finished, or somebody is running it.
        RlxError: it has changed just now.
    """
    orphan = run.status == "running" and run.pid is not None and not is_supervisor(run.pid, run.id)
    if run.effective_status not in RESUMABLE and not orphan:
        raise SpecError(f"{run.id} is {run.effective_status}: there is nothing to go on with")
    if run.pid is not None and is_supervisor(run.pid, run.id):
        raise SpecError(f"{run.id} still has a supervisor, process {run.pid}: rlx stop {run.id}")
    for pid in live_ranks(folder_of(run).root):  # of a supervisor that was killed
        os.kill(pid, signal.SIGKILL)
    if not registry.transition(run.id, {run.status}, "submitted", "resumed"):
        raise RlxError(f"{run.id} has changed just now: try again")


# Verification ------------------------------------------------------------------------------------


@click.command(name="verify-resume")
@click.argument("spec", type=click.Path(path_type=Path, exists=True))
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a value.")
@click.option("--kills", default=3, type=click.IntRange(1), help="Runs that are killed once each.")
@click.option("--seed", default=0, type=int, help="Of the moments.")
@click.option("--keep", is_flag=True, help="Keep the folder of the runs.")
def verify_resume(spec: Path, overrides: tuple[str, ...], kills: int, seed: int, keep: bool) -> int:
    """Run SPEC unbroken, then killed and resumed, and compare every number but times.

    Every run is killed once, at a moment drawn over the length of the unbroken one: its rank, its
    supervisor, or a worker, in turn. The exit code is 1 where a number differs or a run is lost.
    """
    home = Path(tempfile.mkdtemp(prefix="rlx-verify-"))
    trial = _Trial(home, spec, overrides)
    unbroken = trial.submit(follow=True)
    length = trial.seconds(unbroken)
    click.echo(f"unbroken  {unbroken}  {length:.0f} s")
    drawn = random.Random(seed)
    odd = 0
    for number in range(kills):
        victim, moment = VICTIMS[number % len(VICTIMS)], drawn.uniform(0, length)
        run_id, hit = trial.killed(victim, moment)
        with Registry.open(trial.url, read_only=True) as registry:
            found = list(differences(registry, unbroken, run_id))
        odd += bool(found)
        told = "; ".join(found[:3]) or "every number is the same"
        click.echo(f"{victim:<10} {run_id}  at {moment:.1f} s ({hit}): {told}")
    click.echo(f"{kills - odd} of {kills} killed runs have the unbroken one's numbers")
    if odd or keep:
        click.echo(f"the runs are in {home}")
    else:
        shutil.rmtree(home, ignore_errors=True)
    return 1 if odd else 0


class _Trial:
    """A home of its own, and the command line in it."""

    def __init__(self, home: Path, spec: Path, overrides: tuple[str, ...]) -> None:
        self.url = f"sqlite:///{home}/registry.db"
        self._environment = {**os.environ, "RLX_HOME": str(home), "RLX_REGISTRY": self.url}
        sets = [word for value in overrides for word in ("--set", value)]
        own = ["--set", "tracking.mlflow=null", "--set", f"tracking.registry={self.url}"]
        self._submit = ["submit", str(spec), "--again", "-q", *sets, *own]

    def _rlx(self, *arguments: str) -> str:
        code = "import sys; from rlx.cli import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RlxError(
                f"rlx {arguments[0]} ended with {done.returncode}: {done.stderr[-2000:]}"
            )
        return done.stdout.strip()

    def submit(self, *, follow: bool) -> str:
        """Starts a run; waits for its end where asked to."""
        return self._rlx(*self._submit, *(() if follow else ("-d",)))

    def seconds(self, run_id: str) -> float:
        """How long a run took, its start included."""
        with Registry.open(self.url, read_only=True) as registry:
            run = registry.run(run_id)
        return (run.ended or run.created) - run.created

    def killed(self, victim: str, moment: float) -> tuple[str, str]:
        """A run one of whose processes is killed; its id, and what it was doing then."""
        run_id = self.submit(follow=False)
        time.sleep(moment)
        with Registry.open(self.url, read_only=True) as registry:
            folder = folder_of(registry.run(run_id))
        stage = read_progress(folder.progress)
        pids = list(self._of(run_id, victim, folder.root))
        for pid in pids[:1]:
            os.kill(pid, signal.SIGKILL)
        self._see_through(run_id)
        doing = "starting" if stage is None else f"{stage.stage} {stage.done}/{stage.total}"
        return run_id, doing if pids else f"{doing}, nobody left to kill"

    def _of(self, run_id: str, victim: str, folder: Path) -> Iterator[int]:
        """Processes of a run that play a part."""
        with Registry.open(self.url, read_only=True) as registry:
            supervisor = registry.run(run_id).pid
        if victim == "supervisor":
            if supervisor is not None and is_supervisor(supervisor, run_id):
                yield supervisor
            return
        for pid in live_ranks(folder):
            if "torch.distributed.run" in psutil.Process(pid).cmdline():
                continue
            if victim == "rank":
                yield pid
            else:
                yield from (child.pid for child in psutil.Process(pid).children())

    def _see_through(self, run_id: str) -> None:
        """Waits for the end; a run whose supervisor was killed is resumed."""
        while True:
            with Registry.open(self.url, read_only=True) as registry:
                run = registry.run(run_id)
            if run.status in ("finished", "failed", "stopped"):
                return
            if run.pid is not None and not is_supervisor(run.pid, run.id):
                self._rlx("resume", run_id, "-q", "--registry", self.url)
                return
            time.sleep(0.2)
