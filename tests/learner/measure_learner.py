"""Measures the learner against plain PyTorch on every rank that torchrun started.

    python -m torch.distributed.run --standalone --nproc-per-node N measure_learner.py OUT

One start makes all measurements, since starting costs more than they do; `test_learner.py` judges
them. The gradient is read off one AdamW step: with ε = 1 a first step moves a weight by
lr · g / (|g| + 1), which can be inverted whatever ZeRO stage holds the gradient.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rlx.batch import TokenBatch, flatten
from rlx.learner import Learner, join_ranks
from rlx.learner.pack import wanted
from rlx.loss import clipped_surrogate
from rlx.model import build_policy
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx.spec import LossSpec, OptimizerSpec, RunnerSpec, Tiny
from rlx.step import TrainBatch

MODEL = Tiny(
    hidden_size=64, heads=2, kv_heads=1, layers=2, intermediate_size=96, initializer_range=0.1
)
LOSS = LossSpec(clip=(0.2, 0.28), dual_clip=3.0)
TEMPERATURES = {"answer": 1.0, "confidence": 0.7}
LR = 1e4
"""So large that rounding of the weights themselves does not show in what they moved by."""
READABLE = OptimizerSpec(learning_rate=LR, eps=1.0, max_grad_norm=1e6)
USUAL = OptimizerSpec(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5)
LIMITS = (16_384, 60)
"""All trees in one micro-batch, and so few tokens that trees are cut and micro-batches differ."""


def rollout_trees(seed, count=5):
    """Two-turn trees of ragged lengths; two answers of every tree are the same."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(least, most):
        n = int(torch.randint(least, most + 1, (), generator=generator))
        return tuple(torch.randint(4, 140, (n,), generator=generator).tolist())

    def turn(parent, number, kind, ids):
        logprobs = tuple((-2 - torch.rand(len(ids), generator=generator)).tolist())
        return Segment(
            parent=parent, author="policy", token_ids=ids, turn=number, kind=kind, logprobs=logprobs
        )

    trees = []
    for n in range(count):
        segments = [Segment(parent=NO_PARENT, author="prompt", token_ids=tokens(3, 12))]
        answers = [tokens(1, 4 + 5 * n) for _ in range(2)]
        for ids in (*answers, answers[0]):
            segments.append(turn(0, 1, "answer", ids))
            answer = len(segments) - 1
            segments.append(Segment(parent=answer, author="prompt", token_ids=(2, 14, 15)))
            question = len(segments) - 1
            segments += [turn(question, 2, "confidence", tokens(1, 4)) for _ in range(2)]
        trees.append(RolloutTree(Problem(id=str(n), prompt="", fields={}), tuple(segments)))
    return trees


def train_batch(seed, model):
    """A batch with clipped and unclipped tokens, silent rows, and an entropy bonus."""
    batch = flatten(rollout_trees(seed), temperatures=TEMPERATURES)
    generator = torch.Generator().manual_seed(seed + 1)
    shape = batch.token_ids.shape
    advantages = torch.randn(shape[0], 1, generator=generator).expand(shape)
    silent = torch.rand(shape[0], 1, generator=generator) < 0.2
    mask = batch.is_own
    train = TrainBatch(
        batch=batch,
        mask=mask,
        advantages=advantages.where(mask & ~silent, 0.0),
        weights=mask / mask.sum(),
        entropy_weights=0.01 * (batch.turn_ids == 2) / mask.sum(),
    )
    with torch.no_grad():
        logprobs, _ = plain_logprobs(model, batch)
    noise = 0.3 * torch.randn(shape, generator=generator)
    return train, (logprobs + noise).where(mask, 0.0)


# Plain -------------------------------------------------------------------------------------------


def plain_logprobs(model, batch: TokenBatch):
    """`[B, T]` and `[B, T]` log-probability and entropy by padded forwards, nothing shared."""
    attention = batch.is_token.long()
    logits = model(input_ids=batch.token_ids, attention_mask=attention).logits[:, :-1]
    logprobs = torch.log_softmax(logits / batch.temperatures[:, 1:, None], dim=-1)
    chosen = logprobs.gather(2, batch.token_ids[:, 1:, None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return tuple(torch.nn.functional.pad(x, (1, 0)) for x in (chosen, entropy))


def plain_loss(model, train, old):
    logprobs, entropy = plain_logprobs(model, train.batch)
    token = clipped_surrogate(
        logprobs, old, train.advantages, clip=LOSS.clip, dual_clip=LOSS.dual_clip
    )
    return (train.weights * token).sum() - (train.entropy_weights * entropy).sum()


def plain_gradient(train, old):
    model = build_policy(MODEL, 0).model
    loss = plain_loss(model, train, old)
    loss.backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    return float(loss.detach()), gradient


def plain_steps(batches, optimizer):
    """Weights after one step of torch's own AdamW on each batch."""
    model = build_policy(MODEL, 0).model
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
    for train, old in batches:
        adam.zero_grad()
        plain_loss(model, train, old).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
        adam.step()
    return copied(dict(model.named_parameters()))


# The learner -------------------------------------------------------------------------------------


def copied(weights):
    return {name: weight.detach().clone() for name, weight in weights.items()}


def gradient_of_step(before, after):
    gradient = {}
    for name in before:
        moved = (before[name].double() - after[name].double()) / LR
        gradient[name] = (moved / (1 - moved.abs())).float()
    return gradient


def norm(tensors):
    return float(torch.sqrt(sum(t.double().square().sum() for t in tensors)))


def worst(found, expected):
    """Largest relative L2 distance of one parameter."""
    return max(norm([found[n] - expected[n]]) / norm([expected[n]]) for n in expected)


def whole(found, expected):
    """Relative L2 distance of all parameters together."""
    distance = norm([found[n] - expected[n] for n in expected])
    return distance / norm(expected.values())


class Bench:
    """Measures one ZeRO stage."""

    def __init__(self, stage, ranks, batches):
        self.stage, self.ranks = stage, ranks
        self.batches = batches
        self.loss, self.gradient = plain_gradient(*batches[0])

    def learner(self, optimizer, limit=LIMITS[1]):
        policy = build_policy(MODEL, 0)
        runner = RunnerSpec(zero_stage=self.stage, micro_batch_tokens=limit, device="cpu")
        return policy, Learner(policy, runner, optimizer, self.ranks)

    def stepped(self, learner, which=0, rate=LR):
        """Gradient that one step went along, and its figures."""
        before = copied(learner.weights())
        stats = learner.update(*self.batches[which], LOSS, rate)
        return gradient_of_step(before, learner.weights()), stats

    def first_step(self, limit):
        """One step, after asking for log-probabilities and an update without any signal."""
        _, learner = self.learner(READABLE, limit)
        quiet = {**self.logprobs(learner), **self.silence(learner)}
        found, stats = self.stepped(learner)
        everywhere = self.ranks.gather(found)
        return {
            **quiet,
            "worst": worst(found, self.gradient),
            "whole": whole(found, self.gradient),
            "loss": stats.loss,
            "plain_loss": self.loss,
            "grad_norm": stats.grad_norm,
            "plain_norm": norm(self.gradient.values()),
            "clip_fraction": stats.clip_fraction,
            "bonus_entropy": stats.bonus_entropy,
            "computed_tokens": stats.computed_tokens,
            "row_tokens": stats.row_tokens,
            "ranks_agree": all(torch.equal(g[n], found[n]) for g in everywhere for n in found),
        }

    def logprobs(self, learner):
        """Largest distance from plain log-probabilities, and what stands where none is wanted."""
        train, _ = self.batches[0]
        want, found = wanted(train), learner.logprobs(train)
        with torch.no_grad():
            plain, _ = plain_logprobs(build_policy(MODEL, 0).model, train.batch)
        apart = float((found - plain)[want].abs().max())
        return {"logprobs_apart": apart, "logprobs_outside": float(found[~want].abs().max())}

    def silence(self, learner):
        """Whether an update without signal is None on every rank and changes nothing."""
        (train, old), before = self.batches[0], copied(learner.weights())
        nothing = replace(
            train,
            advantages=torch.zeros_like(train.advantages),
            entropy_weights=torch.zeros_like(train.entropy_weights),
        )
        stats = self.ranks.gather(learner.update(nothing, old, LOSS, LR))
        same = all(torch.equal(before[n], w) for n, w in learner.weights().items())
        return {"silent": stats == [None] * self.ranks.count, "silence_changes_nothing": same}

    def second_phase(self, *, fresh):
        """A phase with half the bound, after a step at rate 0 that filled Adam's moments.

        Returns:
            How far its first step is from the clipped gradient, and the norm it reports.
        """
        length = norm(self.gradient.values())
        _, learner = self.learner(READABLE)
        learner.update(*self.batches[1], LOSS, 0.0)
        bounded = READABLE.model_copy(update={"max_grad_norm": length / 2})
        learner.begin_phase(bounded, fresh=fresh)
        found, stats = self.stepped(learner)
        clipped = {name: gradient / 2 for name, gradient in self.gradient.items()}
        return {"apart": whole(found, clipped), "reported": stats.grad_norm / length}

    def usual_steps(self, folder):
        """Three usual steps against torch's own optimiser, and what is exported after them."""
        policy, learner = self.learner(USUAL)
        for train, old in self.batches:
            learner.update(train, old, LOSS, USUAL.learning_rate)
        learner.export(policy, folder)
        own = copied(learner.weights())
        if not self.ranks.is_first:
            return None
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        twin = build_policy(MODEL, 5).model.eval()
        twin.load_state_dict(own, strict=False)
        ids = torch.arange(4, 24)[None]
        with torch.no_grad():
            logits = [model(input_ids=ids).logits for model in (loaded, twin)]
        weights = dict(loaded.named_parameters())
        return {
            "apart": whole(own, plain_steps(self.batches, USUAL)),
            "names": sorted(weights) == sorted(own),
            "weights": all(torch.equal(weights[n], own[n]) for n in own),
            "logits": torch.equal(*logits),
            "dtype": str(loaded.dtype),
        }


def main(out):
    ranks = join_ranks(RunnerSpec(device="cpu"))
    model = build_policy(MODEL, 0).model
    batches = [train_batch(seed, model) for seed in (0, 100, 200)]
    measured = {}
    for stage in range(4):
        bench = Bench(stage, ranks, batches)
        measured[stage] = {
            "first_step": {limit: bench.first_step(limit) for limit in LIMITS},
            "fresh": bench.second_phase(fresh=True),
            "carried": bench.second_phase(fresh=False),
            "usual_steps": bench.usual_steps(out.parent / f"model-{ranks.count}-{stage}"),
        }
    if ranks.is_first:
        out.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
