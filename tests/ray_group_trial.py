"""A group of runs on a Ray cluster that is killed half-way: `make ray-group-trial`.

Runs a group of small runs with the queue of this machine, and the same group under another name on
three raylets, which stand for three machines. Once half of its runs have finished, the command that
follows them, the supervisors of half of those that run, and a node are killed; another node joins,
and the command is repeated. What the registry then has of each run must be what it has of its twin,
except times and places.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patience import signal_processes, wait_until
from raylets import RayCluster, open_ray_cluster

from rlx.record import find_run_differences
from rlx_registry import Registry, RunRecord

MAIN = "import sys; from rlx.cli import main; sys.exit(main())"
RLCR = Path(__file__).parents[1] / "experiments" / "rlcr.yaml"
SMALL = {
    "model.hidden_size": "32",
    "model.heads": "1",
    "model.kv_heads": "1",
    "model.layers": "1",
    "model.intermediate_size": "32",
    "model.warm_start.steps": "100",
    "model.warm_start.batch_size": "32",
    "model.warm_start.warmup_steps": "10",
    "model.warm_start.learning_rate": "1e-2",
    "phases.0.steps": "2",
    "phases.1.steps": "4",
    "rollout.prompts_per_step": "4",
    "rollout.num_generations_answer": "4",
    "rollout.num_generations_confidence": "4",
    "evaluation.problems": "20",
    "runner.checkpoint": "{every: 1}",
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
}
GRID = "estimator.confidence.normalize=center,std"
RUN_ROWS = ("digest", "seed", "status", "step", "steps_total", "plugins", "code", "phase", "reason")
"""What is recorded of a run itself, besides its experiment, times and places."""
OF_MACHINE = frozenset({"attempt_failed", "resumed", "resources", "waiting", "paused", "continued"})
"""Kinds of events that tell of processes and machines."""
MEASURED = re.compile(r" \(in a trial .*\)")
"""What a time was measured for, in a message."""


class Home:
    """A registry in which both groups are."""

    def __init__(self, folder: Path, seeds: str) -> None:
        self._seeds, self._url = seeds, f"sqlite:///{folder / 'registry.db'}"
        self._environment = {**os.environ, "RLX_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}

    def begin(self, name: str, **sets: str) -> "subprocess.Popen[bytes]":
        """Submits and follows a group, as a user does."""
        every = {**SMALL, "name": name, **sets}
        command = [sys.executable, "-c", MAIN, "submit", str(RLCR), "--seeds", self._seeds]
        command += ["--grid", GRID, "--group", f"group-{name}", "--no-rehearsal"]
        return subprocess.Popen(
            [*command, *(f"--set={path}={value}" for path, value in every.items())],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def registry(self) -> Registry:
        """The registry of both groups."""
        return Registry.open(self._url, read_only=True)

    def list_runs(self, name: str) -> list[RunRecord]:
        """The runs of a group."""
        with self.registry() as registry:
            return list(registry.runs(group=f"group-{name}"))

    def find_differences(self) -> Iterator[tuple[RunRecord, RunRecord | None, list[str]]]:
        """Yields each run of this machine, its twins on the cluster, and in what they differ."""
        there = self.list_runs("there")
        with self.registry() as registry:
            for one in self.list_runs("here"):
                found = [run for run in there if (run.digest, run.seed) == (one.digest, one.seed)]
                if len(found) != 1:
                    yield one, None, [f"the cluster has {len(found)} such runs"]
                    continue
                differences = list(find_run_differences(registry, one.id, found[0].id))
                differences += _compare_rows(*(_list_rows(registry, r) for r in (one, found[0])))
                yield one, found[0], differences


def _list_rows(registry: Registry, run: RunRecord) -> dict[str, Any]:
    """What the registry has of a run besides its results, without times and places."""
    rows = {name: getattr(run, name) for name in RUN_ROWS}
    spec = {**run.spec, "name": "", "runner": {**run.spec["runner"], "launcher": ""}}
    events = registry.results.events(run.id)
    return {
        **rows,
        "experiment": spec,
        "artifacts": sorted((one.path, one.kind) for one in registry.results.artifacts(run.id)),
        "checkpoints": [
            {k: v for k, v in asdict(one).items() if k not in ("created", "at")}
            for one in registry.results.checkpoints(run.id)
        ],
        # Every attempt repeats some.
        "events": sorted(
            {(e.kind, MEASURED.sub("", e.message)) for e in events if e.kind not in OF_MACHINE}
        ),
    }


def _compare_rows(here: dict[str, Any], there: dict[str, Any]) -> Iterator[str]:
    """Yields which rows differ; of lists, what only one of them has."""
    for name, row in here.items():
        if isinstance(row, list) and row != there[name]:
            only = [one for one in row if one not in there[name]]
            yield f"{name}: {only} and {[one for one in there[name] if one not in row]}"
        elif row != there[name]:
            yield f"{name}: {row} and {there[name]}"


def kill_half_way(
    home: Home, group: "subprocess.Popen[bytes]", cluster: RayCluster, draw: random.Random
) -> str:
    """Kills the command, supervisors and a node once half of the runs have finished."""

    def is_half_way() -> bool:
        runs = home.list_runs("there")
        done = sum(run.status == "finished" for run in runs)
        assert group.poll() is None, "the command has ended before"
        return bool(runs) and done >= len(runs) // 2 and any(r.status == "running" for r in runs)

    wait_until("half of the runs to finish", is_half_way, limit=7200)
    time.sleep(draw.random() * 5)
    running = [run for run in home.list_runs("there") if run.status == "running"]
    killed = draw.sample(running, (len(running) + 1) // 2)
    group.kill()
    group.wait()
    signal_processes([run.pid for run in killed if run.pid is not None], signal.SIGKILL)
    node = draw.randrange(1, len(cluster.nodes))  # the first has the head
    cluster.kill_node(node)
    cluster.add_node()
    counts = Counter(run.status for run in home.list_runs("there"))
    return f"killed the command, {len(killed)} of {len(running)} supervisors and a node: " + (
        ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    )


def main() -> int:
    """Prints a row per run; returns 0 if all have the same rows."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--seeds", default="0..11", help="of each of the two cells of the grid")
    reader.add_argument("--seed", type=int, default=0, help="of what is killed when")
    given = reader.parse_args()
    draw, began = random.Random(given.seed), time.monotonic()

    def report(what: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {what}", flush=True)

    with tempfile.TemporaryDirectory(prefix="rlx-trial-") as folder, open_ray_cluster() as cluster:
        home = Home(Path(folder), given.seeds)
        code = home.begin("here").wait()
        report(f"{len(home.list_runs('here'))} runs on this machine: exit code {code}")
        launcher = {"runner.launcher": f"{{kind: ray, address: '{cluster.address}'}}"}
        group = home.begin("there", **launcher)
        report(kill_half_way(home, group, cluster, draw))
        code = home.begin("there", **launcher).wait()
        report(f"repeated the command: exit code {code}")
        equal = total = 0
        for one, other, differences in home.find_differences():
            equal, total = equal + (not differences), total + 1
            twin = "none" if other is None else f"{other.id}, attempt {other.attempt}"
            print(f"{one.id} and {twin}: {'NOT EQUAL' if differences else 'equal'}", flush=True)
            for difference in differences[:3]:
                print(f"    {difference[:300]}", flush=True)
        extra = len(home.list_runs("there")) - total
    report(f"{equal} of {total} equal, {extra} runs too many")
    return int(equal < total or bool(extra) or bool(code))


if __name__ == "__main__":
    sys.exit(main())
