"""The main job: `rlx submit experiments/rlcr.yaml` from an empty home, for several seeds."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from harness import Spent, row
from starts import sum_tree_seconds

from rlx.descendants import adopt_orphans, kill_descendants, reap_orphans
from rlx_registry import Registry

__all__ = ["main_job"]

ROOT = Path(__file__).parents[2]
SEEDS = range(5)
LOOK = 0.2
HELD_OUT = ("accuracy", "brier", "ece")


def main_job() -> list[dict]:
    """CPU seconds of all processes, warm start, evaluations, pictures and MLflow included; and
    what the models are worth on held-out problems."""
    adopt_orphans()
    took, figures = zip(*map(_run, SEEDS), strict=True)
    walls = sorted(spent.wall for spent in took)
    said = f"seeds {SEEDS[0]} to {SEEDS[-1]}"
    return [
        row(
            "main_job_cpu_seconds",
            [t.cpu for t in took],
            said,
            "CPU s",
            wall=walls[len(walls) // 2],
        ),
        *(row(f"main_job_{name}", [of[name] for of in figures], said, name) for name in HELD_OUT),
    ]


def _run(seed: int) -> tuple[Spent, dict[str, float]]:
    with TemporaryDirectory() as home:
        before, began = sum_tree_seconds(), time.perf_counter()
        command = [Path(sys.executable).with_name("rlx"), "submit", "experiments/rlcr.yaml", "-q"]
        done = subprocess.run(
            [*command, f"--set=seed={seed}"],
            cwd=ROOT,
            env={**os.environ, "RLX_HOME": home},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        while any(_list_living()):  # the mirror to MLflow and pictures may come after the end
            time.sleep(LOOK)
        spent = Spent(sum_tree_seconds() - before, time.perf_counter() - began)
        kill_descendants()
        reap_orphans()
        names = {f"eval/held_out/{name}": name for name in HELD_OUT}
        with Registry.open(f"sqlite:///{home}/registry.db", read_only=True) as registry:
            metrics = registry.results.metrics(done.stdout.strip(), names)
    return spent, {names[name]: series[-1][1] for name, series in metrics.items()}


def _list_living() -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        if process.status() != psutil.STATUS_ZOMBIE:
            yield process
