"""Tokens per second, use of the arithmetic and memory of the update and of sampling, on one device.

    python speed.py cuda|cpu

A model with random weights, on a GPU of the size and vocabulary of Qwen2.5-1.5B, samples two turns
and learns from them, once in every form of packed trees that the device has and once from plain
rows. TRL's trainer stands beside it where it is installed. Prints figures as they come; on a CPU
sizes are those of a quick look.
"""

import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

from figures import print_figure
from random_model import SHAPES, build_random_policy
from shapes import LOSS, Shape, train_batch

from rlx.learner import Learner, Ranks, choice, join_ranks
from rlx.learner.forms import ForwardForm, PlainForm
from rlx.model import Policy
from rlx.plugin import Problem
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.sampler import TransformersSampler
from rlx.sampler import choice as sampled
from rlx.spec import OptimizerSpec, RunnerSpec, TurnSpec, TwoTurnRolloutSpec

ROUNDS = 5
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16, by what a device's name contains (makers' data sheets)."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured on a kind of device."""

    size: str
    shape: Shape
    dtype: str


CASES = {
    "cuda": Case(
        "1.5b",
        Shape(4, 500, 1000, 30, 20, answers=8, confidences=8),
        "bfloat16",
    ),
    "cpu": Case("small", Shape(2, 40, 20, 8, 6, answers=4, confidences=2), "float32"),
}


@dataclass(frozen=True, slots=True)
class TrlCase:
    """A GRPO step, and what its model differs in from the one of 2.4 million parameters."""

    model: dict[str, int]
    step: dict[str, int]


TRL_CASES = {
    "cuda": TrlCase(
        {
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
        },
        {"prompts": 8, "prompt": 500, "answers": 8, "answer": 500},
    ),
    "cpu": TrlCase({}, {"prompts": 2, "prompt": 40, "answers": 4, "answer": 20}),
}


def build_case_policy(case: Case, ranks: Ranks) -> Policy:
    """The case's model on the device."""
    dtype = getattr(torch, case.dtype)
    return build_random_policy(SHAPES[case.size], ranks.device.type, dtype)


def made(case: Case, ranks: Ranks, form: ForwardForm | None) -> tuple[Policy, Learner]:
    """A policy under a learner; `form` takes the place of what would be chosen."""
    policy = build_case_policy(case, ranks)
    runner = RunnerSpec(
        device=ranks.device.type,
        dtype=case.dtype,
        micro_batch_tokens=max(4 * case.shape.longest, 8192),
    )
    kind = ranks.device.type
    usual = choice.FORMS[kind]
    if form is not None:
        choice.FORMS[kind] = (form,) if isinstance(form, PlainForm) else (form, PlainForm())
    try:
        return policy, Learner(policy, runner, OptimizerSpec(), ranks)
    finally:
        choice.FORMS[kind] = usual


def seconds(device: torch.device, work: Callable[[], object]) -> list[float]:
    """Wall seconds of calls, the first left out; a device's work is waited for."""
    taken = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return taken[1:]


def update(case: Case, ranks: Ranks, form: ForwardForm | None) -> dict[str, Any]:
    """One update: the form, tokens of rows per second, use of the peak, memory at the most."""
    device = ranks.device
    policy, learner = made(case, ranks, form)
    train = train_batch(case.shape, vocabulary=len(policy.tokenizer))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stats = learner.update(train, LOSS, 1e-6)
    assert stats is not None
    middle = statistics.median(seconds(device, lambda: learner.update(train, LOSS, 1e-6)))
    weights = sum(p.numel() for p in policy.model.parameters())
    found = {
        "form": str(learner.chosen),
        "seconds": middle,
        "row_tokens_per_s": stats.row_tokens / middle,
        "computed_tokens": stats.computed_tokens,
        "row_tokens": stats.row_tokens,
        "loss": stats.loss,
        "parameters": weights,
    }
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        if (peak := peak_flops()) is not None:
            found["model_flop_utilisation"] = 6 * weights * stats.computed_tokens / middle / peak
    return found


def peak_flops() -> float | None:
    """Of the GPU that is here, where it is known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def sampling(case: Case, ranks: Ranks, *, captured: bool) -> dict[str, Any]:
    """Both turns: tokens drawn per second, steps captured or not."""
    shape = case.shape
    sampled.CAPTURED = frozenset({ranks.device.type}) if captured else frozenset()
    policy = replace(build_case_policy(case, ranks), end_ids=())  # every length is the limit
    sampler = TransformersSampler(policy, max_rows=512, device=ranks.device)
    schedule = TwoTurnRolloutSpec(
        num_generations_answer=shape.answers,
        num_generations_confidence=shape.confidences,
        answer=TurnSpec(max_new_tokens=shape.answer),
        confidence=TurnSpec(template="sure?\n", max_new_tokens=shape.confidence),
    )
    prompt = "12 7 " * (shape.prompt // 5)  # a token per character
    problems = [Problem(id=str(n), prompt=prompt, fields={}) for n in range(shape.prompts)]
    drawn = []

    def work() -> None:
        with sampler.session() as session:
            trees = sample_rollout_trees(
                build_rollout_plan(schedule),
                problems,
                range(len(problems)),
                session,
                policy.dialogue,
            )
        drawn.append(sum(len(s.logprobs) for tree in trees for s in tree.segments))

    middle = statistics.median(seconds(ranks.device, work))
    return {"decoder": sampler.description, "seconds": middle, "tokens_per_s": drawn[-1] / middle}


def beside_trl(device: str) -> dict[str, Any]:
    """GRPO steps of TRL and of rlx in processes in turns, where TRL is installed here."""
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
        return {"missing": "trl and datasets are not installed here; bring them along to compare"}
    sizes = TRL_CASES[device]
    os.environ |= {"RLX_TEST_DEVICE": device, "RLX_BENCH_SIZES": json.dumps(sizes.model)}
    from models import policy
    from steps import grpo_steps

    took = grpo_steps(Path(sys.executable), sizes.step)
    rows, answer = sizes.step["prompts"] * sizes.step["answers"], sizes.step["answer"]
    walls = {side: statistics.median(s.wall for s in spent) for side, spent in took.items()}
    found: dict[str, Any] = {
        "seconds": walls,
        "tokens_per_s": {side: rows * answer / wall for side, wall in walls.items()},
        "times_trl": walls["trl"] / walls["rlx"],
        "peak_gib": {side: max(s.gpu_peak for s in spent) / 2**30 for side, spent in took.items()},
    }
    if (peak := peak_flops()) is not None:
        # What a step needs of plain rows, alike for both sides: read once, learned from once.
        weights = sum(p.numel() for p in policy().model.parameters())
        flops = (2 + 6) * weights * rows * (sizes.step["prompt"] + answer)
        found["model_flop_utilisation"] = {
            side: flops / wall / peak for side, wall in walls.items()
        }
    return found


def main(device: str) -> None:
    """Measures everything, form by form."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**alone, "MASTER_PORT": "0"})
    case, ranks = CASES[device], join_ranks(RunnerSpec(device=device))
    for name, captured in (("sampling", False), ("sampling_captured", True)):
        print_figure(name, **sampling(case, ranks, captured=captured))
    taken: dict[str, float] = {}
    for form in reversed(choice.FORMS[device]):  # the last one is plain rows
        found = update(case, ranks, form)
        taken[form.name] = found["seconds"]
        found["times_plain_rows"] = taken[PlainForm.name] / found["seconds"]
        print_figure(form.name, **found)
        if device == "cuda":
            torch.cuda.empty_cache()
    try:
        print_figure("trl", **beside_trl(device))
    except RuntimeError as error:  # a peer's fault is none of ours
        print_figure("trl", failed=str(error))


if __name__ == "__main__":
    main(sys.argv[1])
