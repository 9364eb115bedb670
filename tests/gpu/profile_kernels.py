"""Where a GPU's time goes: kernels of decoding steps, of sampling, and of one micro-batch.

    python profile_kernels.py cuda|cpu [decode|sample|update ...]

Prints a JSON line for each: seconds of one piece of work, how much of it kernels ran, and the
kernels that took most of it.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

from gpu_kernels import compute_update
from random_model import SHAPES, build_qwen, build_random_policy
from shapes import Shape, train_batch

from rlx.learner import PackedPolicy, choice
from rlx.plugin import Problem
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.sampler import TransformersSampler
from rlx.sampler.flash_steps import can_use_flash
from rlx.sampler.plain_decoder import PlainDecoder
from rlx.sampler.shared_rows import SharingDecoder
from rlx.spec import SingleRolloutSpec, TurnSpec

LISTED = 20
"""Kernels that are named."""


def report(name: str, device: str, pieces: int, work: Callable[[], object]) -> None:
    """Runs `work`, which does `pieces` pieces: to warm up, for its time, and for its kernels."""
    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    work()
    wait()
    began = time.perf_counter()
    work()
    wait()
    wall = time.perf_counter() - began
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        work()
        wait()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spent: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == kind:
            took = event.device_time if on_gpu else event.self_cpu_time_total
            total, count = spent.get(event.name, (0.0, 0))
            spent[event.name] = [total + took, count + 1]
    most = sorted(spent.items(), key=lambda item: -item[1][0])[:LISTED]
    busy = sum(total for total, _ in spent.values()) / 1e6
    figures: dict[str, Any] = {
        "ms": 1e3 * wall / pieces,
        "kernels_ms": 1e3 * busy / pieces,
        "kernels": {
            kernel[:110]: [round(total / pieces / 1e3, 4), round(count / pieces, 1)]
            for kernel, (total, count) in most
        },
    }
    print(json.dumps({name: figures}), flush=True)


@torch.inference_mode()
def decode(device: str) -> None:
    """Captured steps of rows that share prompts, in the middle of a long answer."""
    large = device == "cuda"
    model = build_qwen(SHAPES["1.5b" if large else "small"], device, torch.bfloat16)
    prompts, answers, prompt, before = (64, 8, 120, 500) if large else (2, 2, 10, 6)
    count = model.config.vocab_size
    plain = PlainDecoder(model)
    decoder = SharingDecoder(plain, captures=True, flash=can_use_flash(plain))
    state = decoder.start(prompts)
    state.read(torch.randint(count, (prompts, prompt)).tolist(), 0)
    state = state.fork([n for n in range(prompts) for _ in range(answers)], 2 * before)
    tokens = torch.randint(count, (prompts * answers,), device=device)
    for _ in range(before):
        state.step(tokens)
    steps = 8

    def work() -> None:
        for _ in range(steps):
            state.step(tokens)

    report(f"decode {prompts * answers} rows", device, steps, work)


def sample(device: str) -> None:
    """A turn, as a run samples it: draws, stops and all."""
    large = device == "cuda"
    shape = SHAPES["1.5b" if large else "small"]
    policy = build_random_policy(shape, device, torch.bfloat16)
    sampler = TransformersSampler(policy, max_rows=512, device=torch.device(device))
    prompts, answers, tokens = (64, 8, 192) if large else (2, 2, 6)
    schedule = SingleRolloutSpec(
        prompts_per_step=prompts,
        num_generations_answer=answers,
        answer=TurnSpec(max_new_tokens=tokens, stop=["</answer>"]),
    )
    problems = [
        Problem(id=str(n), prompt=f"numbers {n} 7 9, target 12: " * 6, fields={})
        for n in range(prompts)
    ]

    def work() -> None:
        with sampler.session() as session:
            plan = build_rollout_plan(schedule)
            sample_rollout_trees(plan, problems, range(prompts), session, policy.dialogue)

    report(f"sample {prompts * answers} rows", device, tokens, work)


def update(device: str) -> None:
    """Forward and backward pass of a micro-batch of some 8,000 tokens."""
    large = device == "cuda"
    shape = SHAPES["1.5b" if large else "small"]
    sizes = Shape(1, 100, 1024, 70, 256, 3, 4) if large else Shape(1, 10, 8, 4, 4, 2, 2)
    train = train_batch(sizes, shape.vocabulary)
    limit = train.batch.token_ids.numel()
    for form in choice.FORMS[device][:1]:
        module = PackedPolicy(build_qwen(shape, device, torch.bfloat16))
        module.use(form)
        for chunks in (True, False):
            module.chunks_logits = chunks
            compute_update(module, train, limit)
            name = f"update, {form.name}, {'chunks' if chunks else 'whole logits'}"
            report(name, device, 1, lambda module=module: compute_update(module, train, limit))


if __name__ == "__main__":
    device, *wanted = sys.argv[1:]
    for part in (decode, sample, update):
        if not wanted or part.__name__ in wanted:
            part(device)
            if device == "cuda":
                torch.cuda.empty_cache()
