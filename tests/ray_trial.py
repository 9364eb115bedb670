"""Runs on a Ray cluster that keep losing parts: `make ray-trial`, or ARGS="--kills 20 --seed 1".

An experiment is run on two ranks of this machine, and again on a cluster of three raylets, with its
scorers and vLLM servers as actors. Each run on the cluster loses something at a random moment: a
rank, an actor, a server's process, a node, after which another node joins, or the head, after which
a new cluster comes up at its address. Whether each has the numbers of the run on this machine is
printed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from patience import wait_until
from raylets import RayCluster, open_ray_cluster

from rlx.record import find_run_differences
from rlx_registry import Registry, RunRecord

MAIN = "import sys; from rlx.cli import main; sys.exit(main())"
QUICK = Path(__file__).parents[1] / "experiments" / "quick.yaml"
NODE = {"desk": 1.0, "bench": 2.0, "rack": 1.0}
"""What a node holds: a rank, two scorers and a server. Two of three are enough for a run."""
LAUNCHER = (
    "{{kind: ray, address: '{}', strategy: SPREAD, resources: {{CPU: 0.1, desk: 1}}, "
    "scorers: {{count: 4, resources: {{CPU: 0.1, bench: 1}}}}, "
    "server_resources: {{CPU: 0.1, rack: 1}}}}"
)
POOL = "{engine: vllm, kv_cache_mb: 32, pool: {servers: 2, repeatable: true}}"
ALWAYS = {"runner.ranks": "2", "runner.reward_workers": "1", "runner.max_attempts": "5"}
VICTIMS = {
    "rank": "rlx.launch.rank ",
    "actor of a rank": "ray::RankActor",
    "scorer": "ray::ScorerActor",
    "server": "ray::ServerActor",
    "process of a server": "rlx.sampler.vllm_worker",
}
"""What can be lost besides a node and the head, by a part of its command line."""
ABSENCE = 20.0
"""Seconds at most until a lost head is replaced."""


class Trial:
    """A home for the runs of one experiment.

    Args:
        experiment: path of the YAML file.
        sets: overrides of all runs, as PATH=VALUE.
    """

    def __init__(self, folder: Path, experiment: Path, sets: list[str]) -> None:
        self._experiment, self._sets = experiment, sets
        self._registry = f"sqlite:///{folder / 'registry.db'}"
        self._environment = {**os.environ, "RLX_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}

    def submit(self, *sets: str) -> str:
        """Starts a run; returns its id."""
        command = [sys.executable, "-c", MAIN, "submit", str(self._experiment), "-qd"]
        overrides = [f"--set={one}" for one in (*self._sets, *sets)]
        done = subprocess.run(
            [*command, "--again", *overrides],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def find(self, run: str) -> RunRecord:
        """What is recorded of a run."""
        with Registry.open(self._registry, read_only=True) as registry:
            return registry.run(run)

    def await_end(self, run: str) -> RunRecord:
        """Waits for the end of a run."""
        wait_until(f"{run} to end", lambda: self.find(run).ended, limit=3600)
        return self.find(run)

    def compare(self, one: str, other: str) -> list[str]:
        """In what two runs differ."""
        with Registry.open(self._registry, read_only=True) as registry:
            return list(find_run_differences(registry, one, other))

    def await_step(self, run: str) -> None:
        """Waits for the first step of a run, or its end."""
        wait_until("a step", lambda: self.find(run).step >= 1 or self.find(run).ended)


def find_processes(cluster: RayCluster, words: str) -> list[psutil.Process]:
    """Processes of a cluster whose command line holds these words."""
    raylets = [cluster.find_raylet(number) for number in range(len(cluster.nodes))]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if words in " ".join(process.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                found += [process] if {p.pid for p in process.parents()} & {*raylets} else []
    return found


def lose(what: str, cluster: RayCluster, draw: random.Random) -> bool:
    """Kills something; returns whether there was anything to kill."""
    if what == "node":
        cluster.kill_node(draw.randrange(1, len(cluster.nodes)))  # the first has the head
        cluster.add_node(processors=4, **NODE)
        return True
    if what == "head":  # alone, or with its node
        cluster.kill_head(node=draw.random() < 0.5)
        time.sleep(draw.random() * ABSENCE)
        cluster.replace()
        return True
    found = find_processes(cluster, VICTIMS[what])
    if not found:
        return False
    with suppress(psutil.NoSuchProcess):
        draw.choice(found).send_signal(signal.SIGKILL)
    return True


def lose_in_time(
    what: str, run: str, trial: Trial, cluster: RayCluster, draw: random.Random
) -> bool:
    """Kills something of a run as soon as it is there; returns whether the run had not ended."""

    def try_to_lose() -> str:
        return "ended" if trial.find(run).ended else "lost" * lose(what, cluster, draw)

    return wait_until(f"a {what}, or the end of {run}", try_to_lose) == "lost"


def run_trial(
    trial: Trial, cluster: RayCluster, kills: int, victims: list[str], draw: random.Random
) -> Iterator[tuple[str, str, RunRecord, list[str]]]:
    """Yields what each run has lost, at which step, its record, and in what it differs."""
    here = trial.await_end(trial.submit())
    yield "nothing, on this machine", "", here, []
    launcher = f"runner.launcher={LAUNCHER.format(cluster.address)}"
    began = time.monotonic()
    run = trial.submit(launcher)
    trial.await_step(run)
    start = time.monotonic() - began
    there = trial.await_end(run)
    rest = time.monotonic() - began - start
    yield "nothing", "", there, trial.compare(here.id, run)
    for _ in range(kills):
        what = draw.choice(victims)
        run = trial.submit(launcher)
        # A quarter of the kills come before the first step.
        if draw.random() < 0.25:
            time.sleep(draw.random() * start)
        else:
            trial.await_step(run)
            time.sleep(draw.random() * rest)
        step = trial.find(run).step
        done = lose_in_time(what, run, trial, cluster, draw)
        there = trial.await_end(run)
        yield what if done else f"{what}, too late", f"{step}", there, trial.compare(here.id, run)


def main() -> int:
    """Prints a row per run; returns 0 if all have the same numbers."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--experiment", type=Path, default=QUICK)
    reader.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="sets")
    reader.add_argument("--kills", type=int, default=20, help="runs that lose something")
    victims = [*VICTIMS, "node", "head"]
    reader.add_argument("--only", choices=victims, help="what is lost, each time")
    reader.add_argument("--seed", type=int, default=0, help="of what is lost when")
    reader.add_argument("--transformers", action="store_true", help="no servers: ranks sample")
    given = reader.parse_args()
    sets = [f"{path}={value}" for path, value in ALWAYS.items()]
    sets += [] if given.transformers else [f"sampler={POOL}"]
    sets += ["tracking.mlflow=null", "tracking.pictures=false", *given.sets]
    if given.transformers:
        victims = [one for one in victims if "server" not in one]
    equal = total = 0
    with tempfile.TemporaryDirectory(prefix="rlx-trial-") as folder, open_ray_cluster() as cluster:
        for _ in range(3):
            cluster.add_node(processors=4, **NODE)
        trial = Trial(Path(folder), given.experiment, sets)
        victims = [given.only] if given.only else victims
        rows = run_trial(trial, cluster, given.kills, victims, random.Random(given.seed))
        for what, step, run, differences in rows:
            is_equal = run.status == "finished" and not differences
            equal, total = equal + is_equal, total + 1
            at = f" at step {step}" if step else ""
            print(
                f"{run.id}  lost {what}{at}: {run.status}, attempt {run.attempt}, "
                f"{'equal' if is_equal else 'NOT EQUAL'}",
                flush=True,
            )
            for difference in [*differences[:3], *([run.reason] if run.reason else [])]:
                print(f"    {difference}", flush=True)
    print(f"{equal} of {total} equal", flush=True)
    return int(equal < total)


if __name__ == "__main__":
    sys.exit(main())
