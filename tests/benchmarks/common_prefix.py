"""One update of a real model on problems that begin alike; `make bench` runs it.

SmolLM2-135M-Instruct reads the prompts of `experiments/smollm2_grpo.yaml`: a system message, four
worked examples and a question, all of them as long, each with eight answers of eight random tokens.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from harness import Spent, compared, in_turns, row, spent
from torch import Tensor
from transformers import DynamicCache

from rlx.learner import Ranks
from rlx.learner.forward import PackedPolicy, choose_form, choose_logits
from rlx.learner.pack import RankMicroBatches
from rlx.model import Policy, build_policy
from rlx.plan import read_spec
from rlx.rollout.dialogue import list_example_messages
from rlx.spec import ExperimentSpec, RunnerSpec

__all__ = ["common_prefix_update"]

ROOT = Path(__file__).parents[2]
PROBLEMS, ANSWERS, ANSWER = 8, 8, 8
ROUNDS = 3
HERE = Ranks(0, 1, torch.device("cpu"))
NEAR = 1e-4
"""Relative distance of losses and gradients, which is rounding."""

Update = Callable[[], float]


def common_prefix_update() -> list[dict]:
    """Forward and backward as rlx packs them, beside each problem for itself and beside a cache."""
    spec = read_spec(ROOT / "experiments" / "smollm2_grpo.yaml").spec
    policy = build_policy(spec.model, seed=0)
    prompts = _encode_prompts(spec, policy)
    generator = torch.Generator().manual_seed(0)
    answers = torch.randint(5, 49_000, (PROBLEMS * ANSWERS, ANSWER), generator=generator)
    ids = torch.cat([prompts.repeat_interleave(ANSWERS, 0), answers], dim=1)
    weights = torch.randn(len(ids), 1, generator=generator).expand(-1, ANSWER) / answers.numel()
    module = PackedPolicy(policy.model.eval())
    choose_form(module, HERE)
    choose_logits(module, RunnerSpec(device="cpu"), HERE)
    groups = [ids[n : n + ANSWERS] for n in range(0, len(ids), ANSWERS)]
    parts = weights.split(ANSWERS)
    sides: dict[str, Update] = {
        "ours": partial(_update_packed, module, [ids], [weights]),
        "_problems": partial(_update_packed, module, groups, parts),
        "_cache": partial(_update_cached, module, groups, parts),
    }
    found = {name: _read_gradient(module, side) for name, side in sides.items()}
    apart = {name: _compare(found[name], found["ours"]) for name in sides}
    if not max(apart.values()) <= NEAR:
        raise ValueError(f"gradients or losses are {apart} apart")
    del found
    took = in_turns({name: _time(module, side) for name, side in sides.items()}, ROUNDS)
    what = {
        "_problems": "rlx, each problem packed for itself",
        "_cache": "transformers' cache with gradient, each prompt read once",
    }
    prefix = int((prompts == prompts[0]).all(dim=0).int().cumprod(0).sum())
    return [
        row(
            "common_prefix_tokens",
            [_count_tokens(groups) / _count_tokens([ids])],
            f"each problem for itself; {prefix} of {prompts.shape[1]} tokens of a prompt in common",
            "times fewer tokens",
        ),
        *(
            compared(
                f"common_prefix_update{name}",
                took[name],
                took["ours"],
                f"{said}, gradients {apart[name]:.1g} apart",
            )
            for name, said in what.items()
        ),
    ]


def _encode_prompts(spec: ExperimentSpec, policy: Policy) -> Tensor:
    """`[PROBLEMS, P]` token ids of the first problems whose prompts are all as long."""
    examples = list_example_messages(spec.rollout)
    by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for line in (ROOT / "experiments" / "smollm2" / "train.jsonl").read_text().splitlines():
        question = json.loads(line)["question"]
        ids = policy.dialogue.open(question, spec.rollout.system, examples, "<answer>")
        by_length[len(ids)].append(ids)
        if len(by_length[len(ids)]) == PROBLEMS:
            return torch.tensor(by_length[len(ids)])
    raise ValueError(f"no {PROBLEMS} prompts are as long")


def _share(ids: Tensor) -> RankMicroBatches:
    want = torch.zeros_like(ids, dtype=torch.bool)
    want[:, -ANSWER:] = True
    rows = SimpleNamespace(token_ids=ids, is_token=torch.ones_like(want))
    return RankMicroBatches(rows, want, RunnerSpec().micro_batch_tokens, HERE, merge=True)


def _count_tokens(batches: list[Tensor]) -> int:
    return sum(_share(ids).computed_tokens for ids in batches)


def _update_packed(module: PackedPolicy, batches: list[Tensor], weights: list[Tensor]) -> float:
    """Adds the gradient; returns the loss."""
    total = 0.0
    for ids, own in zip(batches, weights, strict=True):
        for packed in _share(ids):
            logprobs = module(packed, torch.ones(len(packed.targets)))[0]
            loss = -(logprobs * own[packed.rows, packed.columns - ids.shape[1] + ANSWER]).sum()
            loss.backward()
            total += float(loss.detach())
    return total


def _update_cached(module: PackedPolicy, batches: list[Tensor], weights: list[Tensor]) -> float:
    """The same with a model of transformers and its cache alone."""
    total = 0.0
    module.model.set_attn_implementation("sdpa")
    for ids, own in zip(batches, weights, strict=True):
        cache = DynamicCache(config=module.model.config)
        prompt, answer = ids[:1, :-ANSWER], ids[:, -ANSWER:]
        read = {"past_key_values": cache, "use_cache": True}
        first = module.model(prompt, **read, logits_to_keep=1).logits
        cache.batch_repeat_interleave(len(ids))
        rest = module.model(answer[:, :-1], **read).logits
        logits = torch.cat([first.expand(len(ids), -1, -1), rest], dim=1)
        logprobs = logits.log_softmax(-1).gather(2, answer[:, :, None])[:, :, 0]
        loss = -(logprobs * own).sum()
        loss.backward()
        total += float(loss.detach())
    module.use(module.form)
    return total


def _read_gradient(module: PackedPolicy, side: Update) -> tuple[float, list[Tensor]]:
    module.zero_grad()
    loss = side()
    return loss, [p.grad.clone() for p in module.parameters() if p.grad is not None]


def _compare(found: tuple[float, list[Tensor]], other: tuple[float, list[Tensor]]) -> float:
    """Relative distance of gradients, or of losses if that is larger."""
    pairs = list(zip(found[1], other[1], strict=True))
    distance = sum(float((a - b).double().square().sum()) for a, b in pairs)
    length = sum(float(b.double().square().sum()) for _, b in pairs)
    return max((distance / length) ** 0.5, abs(found[0] - other[0]) / abs(other[0]))


def _time(module: PackedPolicy, side: Update) -> Callable[[], Spent]:
    def take() -> Spent:
        module.zero_grad()
        return spent(side)

    return take
