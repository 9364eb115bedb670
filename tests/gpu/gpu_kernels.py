"""What only a GPU can show of the learner and the sampler, figure by figure.

    python gpu_kernels.py cuda|cpu learner|sampler

learner: every form of packed trees in bfloat16 against plain rows in float32, with its seconds and
its peak, and logits by chunks against whole ones. No form may be further away than plain rows in
bfloat16 are. sampler: captured steps against plain ones, by rows. Each figure is a JSON line of its
own, printed as soon as it is known.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from figures import print_figure
from random_model import SHAPES, build_qwen

from rlx.learner import PackedPolicy, forward
from rlx.learner.pack import pack_rows
from rlx.sampler.decoders import SharingDecoder
from rlx.sampler.plain_decoder import PlainDecoder

TREES = {"cuda": (2, 500, 1000, 30, 40, 4, 2), "cpu": (1, 40, 30, 8, 6, 3, 2)}
"""Trees; tokens of a prompt, an answer, a question and a confidence; answers, confidences."""


def build_rows(device: str, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[B, T]` random token ids, tokens, and those whose log-probability is wanted."""
    count, prompted, answered, asked, stated, answers, confidences = TREES[device]
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(4, vocabulary, (length,), generator=generator).tolist()

    rows, learned, question = [], [], draw(asked)
    for _ in range(count):
        prompt = draw(prompted)
        for _ in range(answers):
            answer = [*prompt, *draw(answered)]
            rows += [answer, *([*answer, *question, *draw(stated)] for _ in range(confidences))]
            learned += [prompted, *[len(answer) + asked] * confidences]
    column = torch.arange(max(map(len, rows)))
    is_token = column < torch.tensor([[len(row)] for row in rows])
    ids = torch.tensor([row + [0] * (len(column) - len(row)) for row in rows])
    return ids, is_token, is_token & (column >= torch.tensor(learned)[:, None])


ROWS = {"cuda": (32, 128, 512), "cpu": (4,)}
STEPS = {"cuda": 200, "cpu": 12}
NEAR = 0.05
"""Relative L2 distance of logits that bfloat16 may make."""
FURTHER = 1.1
"""How much further from float32 than plain rows a form may be."""


def measure(device: str, work: Callable[[], Any]) -> tuple[Any, float, float | None]:
    """The result, seconds of a second call, and the peak in GiB."""
    on_gpu = device == "cuda"
    work()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    result = work()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return result, seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None


def compare(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative L2 distance."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def compute_update(module: PackedPolicy, rows: Any) -> dict[str, torch.Tensor]:
    """Log-probabilities in the order of the rows, and the gradient of the embeddings."""
    device = next(module.parameters()).device
    packed = pack_rows(*rows, merge=module.form.merges).to(device)
    logprobs, _ = module(packed, torch.ones(len(packed.targets), device=device))
    order = (packed.rows * rows[0].shape[1] + packed.columns).argsort()
    weights = torch.linspace(-1, 1, len(order), device=device)
    own = module.model.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad((logprobs[order] * weights).sum(), [own])
    return {"logprobs": logprobs[order].detach(), "gradient": gradient}


def check_learner(device: str) -> None:
    """Every form, then chunks."""
    shape = SHAPES["1.5b" if device == "cuda" else "small"]
    if device == "cuda":
        shape = replace(shape, layers=4)  # what is compared does not need all of them
    rows = build_rows(device, shape.vocabulary)
    reference = PackedPolicy(build_qwen(shape, device, torch.float32))
    reference.use(forward.FORMS["cpu"][-1])
    expected = compute_update(reference, rows)
    del reference
    forms, distances = forward.FORMS[device], {}
    for form in reversed(forms):  # the last one is plain rows
        for chunks in (False, True):
            module = PackedPolicy(build_qwen(shape, device, torch.bfloat16))
            module.use(form)
            module.chunks_logits = chunks
            name = f"{form.name}, {'chunks' if chunks else 'whole logits'}"
            found, seconds, peak = measure(
                device, lambda module=module: compute_update(module, rows)
            )
            distances[name] = {key: compare(found[key], expected[key]) for key in expected}
            print_figure(name, seconds=seconds, peak_gib=peak, distance=distances[name])
            del module, found
    usual = distances[f"{forms[-1].name}, whole logits"]
    faults = {
        name: found
        for name, found in distances.items()
        if not all(found[key] <= FURTHER * usual[key] + 1e-6 for key in usual)
    }
    assert not faults, faults


@torch.inference_mode()
def decode(model: Any, rows: int, steps: int, way: dict[str, bool]) -> torch.Tensor:
    """Logits after the last of some steps, of rows that share a context."""
    decoder = SharingDecoder(PlainDecoder(model), **way)
    generator = torch.Generator().manual_seed(0)
    count = model.config.vocab_size
    context = torch.randint(count, (300 if model.device.type == "cuda" else 20,))
    drawn = torch.randint(count, (steps, rows), generator=generator).to(model.device)
    state = decoder.start(1)
    state.prefill([context.tolist()], 0)
    state = state.fork([0] * rows, steps)
    for tokens in drawn:
        logits = state.step(tokens)
    return logits.clone()


def check_sampler(device: str) -> None:
    """Captured steps against plain ones."""
    shape = SHAPES["1.5b" if device == "cuda" else "small"]
    model = build_qwen(shape, device, torch.bfloat16)
    ways = {"plain": {"captures": False}, "captured": {"captures": True}}
    faults = []
    for rows in ROWS[device]:
        results = {}
        for name, way in ways.items():
            torch.manual_seed(0)
            results[name], seconds, peak = measure(
                device, lambda rows=rows, way=way: decode(model, rows, STEPS[device], way)
            )
            distance = compare(results[name], results["plain"])
            tokens = rows * STEPS[device] / seconds
            print_figure(
                f"{rows} rows, {name}",
                seconds=seconds,
                tokens_per_s=tokens,
                peak_gib=peak,
                distance=distance,
            )
            if not distance < NEAR:
                faults.append(f"{rows} rows: {name} differs by {distance:.2g}")
    assert not faults, faults


if __name__ == "__main__":
    {"learner": check_learner, "sampler": check_sampler}[sys.argv[2]](sys.argv[1])
