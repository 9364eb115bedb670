"""Three steps of a profile with random weights: the peak of each stage beside the plan's.

    python stages.py NAME cuda|cpu [KEY=VALUE...]

On a CPU, sizes are those of a rehearsal. What random weights write earns nothing, and equal rewards
teach nothing: every turn also gets a reward that is a hash of its text. Prints one JSON line.
"""

import json
import os
import sys
import tempfile
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from random_model import write_qwen

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SHORT = {
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
    "phases.0.steps": "3",
    "evaluation.problems": "500",  # that after training is the largest batch of all
    "evaluation.every": "0",
    "runner.checkpoint.every": "3",
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
CHANCE = """
    from zlib import crc32

    from rlx.plugin import Example, Reward, Sample, Score

    SAMPLE = Sample(id="a", problem={}, turn="answer", number=1, response="w1", n_tokens=1)


    class Chance(Reward):
        examples = (Example(name="gold", sample=SAMPLE, value=crc32(b"w1") / 2**32),)

        def score(self, sample: Sample) -> Score:
            return Score(crc32(sample.response.encode()) / 2**32)
"""


def write_chance(into: Path) -> None:
    """Writes a reward plugin `chance`, which other processes find in this folder."""
    (into / "rlx_chance.py").write_text(textwrap.dedent(CHANCE))
    info = into / "rlx_chance-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlx-chance\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[rlx.rewards]\nchance = rlx_chance:Chance\n")
    sys.path.append(str(into))
    roots = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, roots), str(into)])


def main(name: str, device: str, *more: str) -> None:
    """Plans, runs and compares."""
    import rlx

    small = device == "cpu"
    with tempfile.TemporaryDirectory() as home:
        os.environ["RLX_HOME"] = home
        plugins = Path(home) / "plugins"
        plugins.mkdir()
        write_chance(plugins)
        folder = Path(home) / "qwen"
        write_qwen(folder, "small" if small else "1.5b", device)
        overrides = {**SHORT, **(REHEARSAL if small else {}), "model.path": str(folder)}
        overrides["runner.device"] = device
        sets = [*(f"{key}={value}" for key, value in overrides.items()), *more]
        file = EXPERIMENTS / f"{name}.yaml"
        turns = rlx.read(file, *sets).spec.rollout.turns
        sets += [f"rewards.turn.chance_{t}={{plugin: chance, turn: {t}}}" for t in turns]
        experiment = rlx.read(file, *sets)
        memory = experiment.plan().report.phases[0].memory
        run = experiment.submit()
        run.wait()
        last = run.metrics().ffill().iloc[-1].to_dict()
    assert "train/grad_norm" in last, "no step learned anything"
    wanted = ("perf/", "sampler/", "train/", "off_policy/")
    figures = {key: value for key, value in last.items() if key.startswith(wanted)}
    planned = {stage: count / 2**30 for stage, count in memory.stage_totals.items()}
    print(json.dumps({"planned_gib": planned, "figures": figures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
