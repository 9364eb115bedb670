"""Small runs of the three designs, made through the command line."""

import os
import subprocess
import sys
from pathlib import Path

from run_homes import TINY

ROOT = Path(__file__).parents[1]
MAIN = "import sys; from rlx.cli import main; sys.exit(main())"
SMALL = {
    **TINY,
    "model.warm_start.steps": 40,
    "model.warm_start.batch_size": 16,
    "model.warm_start.warmup_steps": 5,
    "rollout.prompts_per_step": 5,
    "evaluation.problems": 10,
    "tracking.mlflow": "null",
}
RLCR = {"phases.0.steps": 2, "phases.1.steps": 4, "rollout.num_generations_confidence": 4}
KG = {"phases.0.steps": 3, "rollout.num_generations": 4}
PROBE = {
    "phases.0.steps": 2,
    "rollout.num_generations_answer": 4,
    "probe.every": 1,
    "probe.problems": 4,
    "probe.samples": 8,
}
RUNS = (
    ("rlcr.yaml", {**RLCR, "seed": 0}),
    ("rlcr.yaml", {**RLCR, "seed": 1}),
    ("kg.yaml", KG),
    ("countdown_probe.yaml", PROBE),
)


def made(folder: Path) -> Path:
    """Makes the runs, two of them of one experiment, and returns their home."""
    environment = {**os.environ, "RLX_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    for yaml, sets in RUNS:
        overrides = [f"--set={path}={value}" for path, value in {**SMALL, **sets}.items()]
        command = ["submit", str(ROOT / "experiments" / yaml), "-q", "--no-rehearsal", *overrides]
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *command],
            env=environment, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return folder / "home"
