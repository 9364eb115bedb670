"""The GPU profiles, shrunk for a CPU: a small model of random weights, few problems, short turns.

What decides how a GPU computes stays as the profile has it: precision, ZeRO stage, offloading,
micro-batches, recomputed layers, engine, turns with their stop strings, critic, KL, probe.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from random_model import SHAPES, SPECIAL, build_qwen, build_tokenizer

from rlx.checks import read_spec
from rlx.spec import ExperimentSpec

__all__ = ["PROFILES", "SHAPE", "group_profiles", "read_small_profile", "write_small_files"]

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PROFILES = sorted(
    str(path.relative_to(EXPERIMENTS).with_suffix(""))
    for path in EXPERIMENTS.rglob("*.yaml")
    if re.search(r"^model: .*kind: pretrained", path.read_text(), re.MULTILINE)
)
SHAPE = replace(
    SHAPES["small"], vocabulary=400, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32
)
ENDS = 40
"""Tokens that end a turn, so that turns differ in length and rows leave their batch."""
TOKENS = 7
"""Of a turn: the fifth step of decoding is captured, and replayed from then on."""
ALWAYS = {
    "model.revision": "null",
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
    "rollout.prompts_per_step": "2",
    "evaluation.problems": "1",
    "evaluation.every": "0",
    "evaluation.variants": "{}",
    "runner.ranks": "1",
    "runner.reward_workers": "1",
    "runner.checkpoint.every": "0",
    "phases.0.steps": "1",
    "optimizer.warmup_steps": "0",
}
SHORT = {
    "rollout.system": "Answer.",
    "rollout.confidence.template": "Sure?",
    "task.files": "null",
}
"""In place of longer texts and of data sets."""
AT_MOST = {
    "rollout.num_generations": 3,
    "rollout.num_generations_answer": 4,
    "rollout.num_generations_confidence": 2,
    "rollout.max_turns": 1,
    "rollout.answer.max_new_tokens": TOKENS,
    "rollout.turn.max_new_tokens": TOKENS,
    "rollout.confidence.max_new_tokens": 4,
    "optimizer.mini_batches": 2,
    "critic.mini_batches": 2,
    "critic.lead_steps": 0,
    "probe.every": 0,
    "probe.problems": 1,
    "probe.samples": 2,
    "probe.max_new_tokens": 4,
}
"""Settings that are lowered where a profile has more."""
SEEN = (
    *("runner.dtype", "runner.zero_stage", "runner.offload_optimizer"),
    *("runner.activation_checkpointing", "model.lora", "sampler.weight_transfer"),
    *("rollout.schedule", "rollout.off_policy_steps", "rollout.turn.stop", "rollout.answer.stop"),
    *("critic.value_clip", "critic.mini_batches", "optimizer.mini_batches", "probe.cut"),
    *("loss.kl", "loss.entropy", "loss.old_logprobs", "credit.use_kl_in_reward"),
    "evaluation.greedy",
)
"""Settings by which other code runs on the GPU. Tasks, rewards and credit are the host's."""


def write_small_files(folder: Path) -> None:
    """Writes the model, its tokenizer, and a few problems in the place of data sets."""
    model = build_qwen(SHAPE, "cpu", torch.bfloat16)
    last = range(SHAPE.vocabulary - ENDS, SHAPE.vocabulary)
    model.generation_config.eos_token_id = [SPECIAL.index("<|im_end|>"), *last]
    model.save_pretrained(folder / "qwen")
    build_tokenizer(SHAPE.vocabulary).save_pretrained(folder / "qwen")
    names = ("question", "problem", "paragraphs", "answer", "removed", "source")
    for split, numbers in (("train", range(8)), ("test", range(8, 12))):
        rows = [json.dumps(dict.fromkeys(names, str(number))) for number in numbers]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))


def read_small_profile(name: str, folder: Path, *more: str) -> ExperimentSpec:
    """Reads a profile with the files that `write_small_files` has written to a folder.

    Random weights earn nothing, and equal rewards teach nothing: every turn is also rewarded for
    its length.
    """
    file = EXPERIMENTS / f"{name}.yaml"
    spec = read_spec(file).spec
    settings = {**ALWAYS, "model.path": str(folder / "qwen")}
    settings |= {key: str(n) for key, n in AT_MOST.items() if (find_setting(spec, key) or 0) > n}
    settings |= {key: text for key, text in SHORT.items() if find_setting(spec, key)}
    if (engine := find_engine(file)) == "transformers":
        settings["sampler"] = f"{{engine: {engine}, max_rows: {spec.sampler.max_rows}}}"
    options = f"limit: {TOKENS}, buffer: {TOKENS}"
    settings["rewards.turn.length"] = f"{{plugin: length.overlong, turn: '*', {options}}}"
    if spec.task.plugin == "dataset":
        for split in ("train", "test"):
            settings[f"task.{split}"] = f"{{path: {folder / split}.jsonl}}"
    return read_spec(file, [*(f"{k}={v}" for k, v in settings.items()), *more]).spec


def find_engine(file: Path) -> str:
    """The engine of a profile: transformers where it leaves the choice to rlx."""
    named = re.search(r"^sampler: .*engine: vllm", file.read_text(), re.MULTILINE)
    return "vllm" if named else "transformers"


def find_setting(spec: object, key: str) -> Any:
    """The value of a setting; None if the profile has no such key."""
    for part in key.split("."):
        spec = spec.get(part) if isinstance(spec, Mapping) else getattr(spec, part, None)
    return spec


def group_profiles() -> dict[str, list[str]]:
    """Profiles of which a GPU sees the same, below the first of them."""
    groups: dict[str, list[str]] = {}
    for name in PROFILES:
        spec = read_spec(EXPERIMENTS / f"{name}.yaml").spec
        seen = [find_engine(EXPERIMENTS / f"{name}.yaml")]
        seen += [str(find_setting(spec, key)) for key in SEEN]
        groups.setdefault("; ".join(seen), []).append(name)
    return {names[0]: names for names in groups.values()}
