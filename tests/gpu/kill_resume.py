"""A run whose rank is killed, beside one that nothing happened to: every number must be the same.

    python tests/gpu/kill_resume.py quick|smollm2_grpo|NAME cuda|cpu [KEY=VALUE...]

`quick` is the shipped experiment; `smollm2_grpo` one of a pretrained model; any other name is a
profile for GPUs with random weights, a checkpoint after every step, and small batches, so that both
runs end in some minutes.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from figures import print_figure
from follow import follow_run
from profiles import EXPERIMENTS, PRETRAINED, open_profile

import rlx
from rlx.api import Experiment, Run
from rlx.launch import find_run_differences, list_live_ranks, open_registry

SMALL = {
    "runner.checkpoint.every": "1",
    "evaluation.problems": "8",
    "rollout.prompts_per_step": "4",
    "phases.0.steps": "8",
}
SMALL_ON_GPU = {"rollout.answer.max_new_tokens": "128"}
LOOK = 0.05


def open_experiment(name: str, device: str, home: Path, overrides: tuple[str, ...]) -> Experiment:
    """Reads the experiment; RLX_HOME is new."""
    os.environ["RLX_HOME"] = str(home)
    if name == "quick":
        sets = (f"runner.device={device}", "tracking.mlflow=null")
        return rlx.read(EXPERIMENTS / "quick.yaml", *sets, *overrides)
    if name in PRETRAINED:
        return open_profile(name, device, home, "runner.checkpoint.every=1", *overrides)
    small = SMALL | (SMALL_ON_GPU if device == "cuda" else {})
    sets = tuple(f"{key}={value}" for key, value in small.items())
    return open_profile(name, device, home, *sets, *overrides)


def kill_rank(run: Run, after: int) -> int:
    """Kills the ranks once a step is recorded; returns the run's step at that time."""
    while run.record.step < after:
        if run.record.ended:
            raise AssertionError(f"{run.id} ended before step {after}: {run.record.reason}")
        time.sleep(LOOK)
    ranks = list(list_live_ranks(Path(run.record.directory)))
    assert ranks, "no rank was found"
    for pid in ranks:
        psutil.Process(pid).send_signal(signal.SIGKILL)
    return int(run.record.step)


def main(name: str, device: str, *overrides: str) -> None:
    """Runs both, and compares."""
    with tempfile.TemporaryDirectory() as home:
        experiment = open_experiment(name, device, Path(home), overrides)
        whole = rlx.submit(experiment)
        follow_run(whole, every=25)
        steps = whole.record.step
        killed = rlx.submit(experiment, again=True)
        at = kill_rank(killed, after=max(1, steps // 2))
        print_figure("killed", step=at, steps=steps)
        killed.wait()
        with open_registry(whole.registry) as registry:
            found = list(find_run_differences(registry, whole.id, killed.id))
            attempts = registry.history(killed.id)[-1].attempt
        print_figure(
            "compared",
            attempts=attempts,
            metrics=whole.metrics().shape[1],
            differences=found[:10],
        )
    assert attempts > 1, "the run was not started again"
    assert not found, f"{len(found)} differences"


if __name__ == "__main__":
    main(*sys.argv[1:])
