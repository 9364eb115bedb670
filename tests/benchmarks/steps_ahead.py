"""How much faster a step is with rollouts sampled several steps ahead, where a scorer is slow.

    python tests/benchmarks/steps_ahead.py              about ten minutes; needs vLLM
    python tests/benchmarks/steps_ahead.py --ahead 0,2 --rounds 1 --steps 12 --wait 0.5

The runs train `experiments/quick.yaml` with one server and a reward that waits, as one does that
asks another service. They take turns, so that what else the machine does falls on all of them
alike. A step's time is the median over the second half of a run. What is printed is the ratio to
that of the same round without steps ahead, its range over the rounds, and the mean age of a token.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

from rlx_registry import Registry

__all__ = ["main"]

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
MAIN = "import sys; from rlx.cli import main; sys.exit(main())"
PLUGIN = '''
import time

from rlx.plugin import reward

@reward
def waiting(sample, *, seconds: float):
    """Waits for so long, and gives nothing."""
    time.sleep(seconds)
    return 0.0
'''
WORKERS = 8
ALWAYS = {
    "sampler": "{engine: vllm, kv_cache_mb: 64, pool: {servers: 1}}",
    "phases.0.steps": 1,
    "evaluation.problems": 4,
    "runner.reward_workers": WORKERS,
    "runner.checkpoint.every": 0,
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
}


def install_plugin(folder: Path) -> None:
    """Makes a package with the reward that waits."""
    info = folder / "rlx_waiting-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "rlx_waiting.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlx-waiting\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[rlx.rewards]\nwaiting = rlx_waiting:waiting\n")


def measure_run(folder: Path, ahead: int, steps: int, wait: float) -> tuple[float, float]:
    """Trains a run; returns the seconds of a step, and the mean age of its tokens in steps.

    Args:
        wait: seconds for which the answers of a step keep all workers.
    """
    answers = 16  # of a step of the experiment
    waiting = f"{{plugin: waiting, turn: answer, seconds: {wait * WORKERS / answers}}}"
    sets = {
        **ALWAYS,
        "phases.1.steps": steps,
        "rollout.off_policy_steps": ahead,
        "rewards.turn._waiting": waiting,
    }
    path = filter(None, [str(folder / "plugin"), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "RLX_HOME": str(folder), "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "submit", str(QUICK), "-q", "--again"]
        + [f"--set={key}={value}" for key, value in sets.items()],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    with Registry.open(f"sqlite:///{folder / 'registry.db'}", read_only=True) as registry:
        metrics = registry.results.metrics(done.stdout.strip())
    late = [value for step, value in metrics["perf/step_s"] if step > 1 + steps // 2]
    ages = [value for step, value in metrics["sampler/staleness"] if step > 1 + steps // 2]
    return median(late), fmean(ages)


def main(arguments: list[str] | None = None) -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ahead", default="0,1,2,4", help="steps ahead; the first is compared to")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--wait", type=float, default=1.0, help="seconds of scoring in a step")
    chosen = parser.parse_args(arguments)
    numbers = [int(number) for number in chosen.ahead.split(",")]
    found: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
    with tempfile.TemporaryDirectory(prefix="rlx-ahead-") as name:
        install_plugin(Path(name) / "plugin")
        for _ in range(chosen.rounds):
            for number in numbers:
                found[number].append(measure_run(Path(name), number, chosen.steps, chosen.wait))
                print(f"{number} ahead: {found[number][-1][0]:.2f} s", file=sys.stderr, flush=True)
    print("| steps ahead | time of a step | ratio, and its range | mean age of a token |")
    print("| --- | --- | --- | --- |")
    plain = [seconds for seconds, _ in found[numbers[0]]]
    for number, runs in found.items():
        seconds = [one for one, _ in runs]
        ratios = sorted(one / base for one, base in zip(seconds, plain, strict=True))
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        age = fmean(age for _, age in runs)
        print(f"| {number} | {median(seconds):.2f} s | {spread} | {age:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
