"""Experiments as the check of a GPU runs them: profiles with random weights, few steps and a reward
by chance; and those of a pretrained model as they are, from its own files.

What random weights write earns nothing, and equal rewards teach nothing: every turn also gets a
reward that is a hash of its text.
"""

import os
import sys
import textwrap
from pathlib import Path

from random_model import write_qwen

import rlx
from rlx.api import Experiment

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PRETRAINED = ("smollm2_grpo", "smollm2_rlcr")
"""Experiments that run as they are, with the model that experiments/smollm2/fetch.py fetches."""
QUIET = {"tracking.mlflow": "null"}
PRETRAINED_REHEARSAL = {
    "phases": "[{name: all, steps: 2}]",
    "evaluation.problems": "2",
    "rollout.prompts_per_step": "2",
    "rollout.num_generations_answer": "3",
    "rewards.turn.chance": "{plugin: chance, turn: '*'}",  # so few answers are all wrong
}
SHORT = {
    **QUIET,
    "phases.0.steps": "3",
    "evaluation.problems": "500",  # that after training is the largest batch of all
    "evaluation.every": "0",
    "runner.checkpoint.every": "3",
    "runner.checkpoint.keep": "1",
}
REHEARSAL = {
    "runner.micro_batch_tokens": "2048",
    "runner.reward_workers": "1",
    "evaluation.problems": "2",
    "rollout.prompts_per_step": "2",
}
BY_SCHEDULE = {
    "single": {"num_generations_answer": 4, "answer.max_new_tokens": 12},
    "two_turn": {
        "num_generations_answer": 4,
        "num_generations_confidence": 2,
        "answer.max_new_tokens": 12,
        "confidence.max_new_tokens": 8,
    },
    "environment": {"num_generations": 4, "max_turns": 2, "turn.max_new_tokens": 12},
}
"""Sizes of a rehearsal on a CPU, below `rollout`."""
CHANCE = """
    from zlib import crc32

    from rlx.plugin import Example, Reward, Sample, Score

    SAMPLE = Sample(id="a", problem={}, turn="answer", number=1, response="w1", n_tokens=1)


    class Chance(Reward):
        examples = (Example(name="gold", sample=SAMPLE, value=crc32(b"w1") / 2**32),)

        def score(self, sample: Sample) -> Score:
            return Score(crc32(sample.response.encode()) / 2**32)
"""


def open_profile(name: str, device: str, home: Path, *overrides: str) -> Experiment:
    """Prepares three steps of a profile, or all of an experiment on a pretrained model; on a CPU,
    sizes are those of a rehearsal.

    Args:
        name: below experiments/.
        device: `cuda` or `cpu`.
        home: a new folder, which becomes RLX_HOME of this process.
        overrides: `path=value`, which come last.
    """
    is_small = device == "cpu"
    os.environ["RLX_HOME"] = str(home)
    write_chance(home / "plugins")
    if name in PRETRAINED:
        values = PRETRAINED_REHEARSAL if is_small else {"runner.dtype": "bfloat16"}
        values = {**QUIET, "runner.device": device, **values}
        sets = [*(f"{key}={value}" for key, value in values.items()), *overrides]
        return rlx.read(EXPERIMENTS / f"{name}.yaml", *sets)
    write_qwen(home / "qwen", "small" if is_small else "1.5b", device)
    file = EXPERIMENTS / f"{name}.yaml"
    rollout = rlx.read(file).spec.rollout
    values = {**SHORT, "model.path": str(home / "qwen"), "runner.device": device}
    if is_small:
        sizes = BY_SCHEDULE[rollout.schedule]
        values |= REHEARSAL | {f"rollout.{key}": str(value) for key, value in sizes.items()}
    sets = [*(f"{key}={value}" for key, value in values.items()), *overrides]
    return rlx.read(file, *sets, "rewards.turn.chance={plugin: chance, turn: '*'}")


def write_chance(into: Path) -> None:
    """Writes a reward plugin `chance`, which other processes find in this new folder."""
    into.mkdir()
    (into / "rlx_chance.py").write_text(textwrap.dedent(CHANCE))
    info = into / "rlx_chance-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlx-chance\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[rlx.rewards]\nchance = rlx_chance:Chance\n")
    sys.path.append(str(into))
    roots = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, roots), str(into)])
