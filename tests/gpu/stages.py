"""Three steps of a profile with random weights: the peak of each stage beside the plan's.

    python stages.py NAME cuda|cpu [KEY=VALUE...]

On a CPU, sizes are those of a rehearsal. Prints one JSON line.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from random_model import write_qwen

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SHORT = {
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
    "phases.0.steps": "3",
    "evaluation.problems": "16",
    "evaluation.every": "0",
    "runner.checkpoint.every": "2",
    "runner.checkpoint.keep": "1",
}
REHEARSAL = {
    "rollout.prompts_per_step": "2",
    "rollout.num_generations_answer": "4",
    "rollout.answer.max_new_tokens": "12",
    "runner.micro_batch_tokens": "2048",
    "runner.reward_workers": "1",
    "evaluation.problems": "2",
}


def main(name: str, device: str, *more: str) -> None:
    """Plans, runs and compares."""
    import rlx

    small = device == "cpu"
    with tempfile.TemporaryDirectory() as home:
        os.environ["RLX_HOME"] = home
        folder = Path(home) / "qwen"
        write_qwen(folder, "small" if small else "1.5b", device)
        overrides = {**SHORT, **(REHEARSAL if small else {}), "model.path": str(folder)}
        overrides["runner.device"] = device
        sets = [*(f"{key}={value}" for key, value in overrides.items()), *more]
        experiment = rlx.read(EXPERIMENTS / f"{name}.yaml", *sets)
        memory = experiment.plan().report.phases[0].memory
        run = experiment.submit()
        run.wait()
        last = run.metrics().ffill().iloc[-1].to_dict()
    wanted = ("perf/", "sampler/", "train/", "off_policy/")
    figures = {key: value for key, value in last.items() if key.startswith(wanted)}
    planned = {stage: count / 2**30 for stage, count in memory.stage_totals.items()}
    print(json.dumps({"planned_gib": planned, "figures": figures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
