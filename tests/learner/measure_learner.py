"""Measures the learner against plain PyTorch on every rank that torchrun started.

    python -m torch.distributed.run --standalone --nproc-per-node N measure_learner.py OUT

One start makes all measurements, since starting costs more than they do; `test_learner.py` judges
them. The gradient is read off one step, whatever ZeRO stage holds it: plain SGD moves a weight by
lr · g, and AdamW with ε = 1 at first by lr · g / (|g| + 1), which can be inverted.
"""

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlx.batch import TokenBatch, flatten
from rlx.learner import Learner, join_ranks
from rlx.learner.engine import adamw
from rlx.learner.pack import deal, pack, wanted
from rlx.loss import clipped_surrogate
from rlx.model import build_policy
from rlx.model.lora import adapt, adapter_weights
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx.spec import Lora, LossSpec, OptimizerSpec, RunnerSpec, Tiny
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
DEVICE = os.environ.get("RLX_TEST_DEVICE", "cpu")
if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
    DEVICE = "cpu"  # ranks do not share a device
LIMITS = {"whole": 16_384, "several": 84, "cut": 60}
"""Tokens per micro-batch: all trees in one, several of them, so few that trees are cut."""
LORA = Lora(rank=4, alpha=6)
HALF = 2
"""ZeRO stage at which bfloat16 is tried."""
DROPOUT = 0.5
"""Which models drop in training; a learner that did would not follow the policy that sampled."""


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


def plain_model(*, lora):
    """The model, and by name what learns of it: everything, or adapters that peft puts in."""
    model = build_policy(MODEL, 0).model
    if not lora:
        return model, dict(model.named_parameters())
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear")
    model = peft.get_peft_model(model, config)
    learned = {
        name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad
    }
    fill(learned)
    return model, learned


@torch.no_grad()
def fill(adapter):
    """Puts numbers in an adapter; as it begins, B is zero and so is the gradient of A."""
    generator = torch.Generator().manual_seed(7)
    for name in sorted(adapter):
        adapter[name].copy_(0.1 * torch.randn(adapter[name].shape, generator=generator))


def plain_logprobs(model, batch: TokenBatch):
    """`[B, T]` and `[B, T]` log-probability and entropy by padded forwards, nothing shared."""
    attention = batch.is_token.long()
    logits = model(input_ids=batch.token_ids, attention_mask=attention).logits[:, :-1]
    logprobs = torch.log_softmax(logits / batch.temperatures[:, 1:, None], dim=-1)
    chosen = logprobs.gather(2, batch.token_ids[:, 1:, None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return tuple(torch.nn.functional.pad(x, (1, 0)) for x in (chosen, entropy))


@functools.cache
@torch.no_grad()
def plain_answers(batch, *, lora):
    """`[B, T]` log-probabilities before any step."""
    return plain_logprobs(plain_model(lora=lora)[0], batch)[0]


def plain_loss(model, train, old):
    logprobs, entropy = plain_logprobs(model, train.batch)
    token = clipped_surrogate(
        logprobs, old, train.advantages, clip=LOSS.clip, dual_clip=LOSS.dual_clip
    )
    return (train.weights * token).sum() - (train.entropy_weights * entropy).sum()


@functools.cache
def plain_step(train, old, *, lora):
    """Loss, gradient, and what torch's own SGD takes off."""
    model, learned = plain_model(lora=lora)
    before = copied(learned)
    loss = plain_loss(model, train, old)
    loss.backward()
    torch.optim.SGD(learned.values(), lr=LR).step()
    gradient = {name: p.grad for name, p in learned.items()}
    return float(loss.detach()), gradient, difference(before, learned)


@functools.cache
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
    return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}


def difference(before, after):
    return {name: before[name].double() - after[name].detach().cpu().double() for name in before}


def sgd(parameters, spec):
    return torch.optim.SGD(parameters, lr=spec.learning_rate)


def gradient_of_step(before, after):
    gradient = {}
    for name, distance in difference(before, after).items():
        moved = distance / LR
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
    """Measures one ZeRO stage, learning the whole model or adapters."""

    def __init__(self, stage, ranks, batches, folder, *, lora):
        self.stage, self.ranks, self.lora = stage, ranks, lora
        self.batches = batches
        self.folder = folder / f"{ranks.count}-{stage}-{lora}"
        self.loss, self.gradient, self.taken_off = plain_step(*batches[0], lora=lora)

    def learner(self, optimizer, limit="cut", make_optimizer=adamw, **runner):
        policy = build_policy(MODEL, 0)
        for layer in policy.model.model.layers:
            layer.self_attn.attention_dropout = DROPOUT
        if self.lora:
            adapt(policy.model, LORA, 0)
            fill(adapter_weights(policy.model))
        runner = RunnerSpec(
            zero_stage=self.stage, micro_batch_tokens=LIMITS[limit], device=DEVICE, **runner
        )
        return policy, Learner(policy, runner, optimizer, self.ranks, make_optimizer)

    def read(self, policy, learner):
        """Whole values of what learns. An adapter is read from the files of an export."""
        if not self.lora:
            return copied(learner.weights())
        learner.export(policy, self.folder)
        read = load_file(self.folder / "adapter" / "adapter_model.safetensors")
        self.ranks.barrier()
        return read

    def stepped(self, policy, learner, batch):
        """What learns, before and after one step, and the step's figures."""
        before = self.read(policy, learner)
        stats = learner.update(*batch, LOSS, LR)
        return before, self.read(policy, learner), stats

    def dealt(self, train, limit):
        """Packed trees in every micro-batch of every rank."""
        batch, tokens = train.batch, LIMITS[limit]
        trees = pack(batch.token_ids, batch.is_token, batch.tree_ids, wanted(train), tokens)
        return [[len(m) for m in share] for share in deal(trees, self.ranks.count, tokens)]

    def first_step(self, limit):
        """A step of SGD, after asking for log-probabilities and an update without any signal."""
        policy, learner = self.learner(READABLE, limit, sgd)
        quiet = {**self.logprobs(learner), **self.silence(learner)}
        if self.lora:
            quiet["export"] = self.merged(policy, learner)
        before, after, stats = self.stepped(policy, learner, self.batches[0])
        everywhere = self.ranks.gather(copied(learner.weights()))
        found = difference(before, after)
        gradient = {name: LR * g for name, g in self.gradient.items()}
        return {
            **quiet,
            "worst": worst(found, gradient),
            "whole": whole(found, gradient),
            "taken_off": whole(found, self.taken_off),
            "loss": stats.loss,
            "plain_loss": self.loss,
            "grad_norm": stats.grad_norm,
            "plain_norm": norm(self.gradient.values()),
            "clip_fraction": stats.clip_fraction,
            "bonus_entropy": stats.bonus_entropy,
            "computed_tokens": stats.computed_tokens,
            "row_tokens": stats.row_tokens,
            "ranks_agree": all(torch.equal(w[n], everywhere[0][n]) for w in everywhere for n in w),
            "dealt": self.dealt(self.batches[0][0], limit),
        }

    def one_tree(self):
        """A step of SGD on a single tree: of two ranks, one has nothing but a filler."""
        train, old = self.batches[0]
        first = (train.batch.tree_ids == train.batch.tree_ids[0])[:, None]
        alone = replace(
            train,
            advantages=train.advantages.where(first, 0.0),
            entropy_weights=train.entropy_weights.where(first, 0.0),
        )
        before, after, _ = self.stepped(*self.learner(READABLE, "whole", sgd), (alone, old))
        *_, expected = plain_step(alone, old, lora=self.lora)
        return {
            "apart": whole(difference(before, after), expected),
            "dealt": self.dealt(alone, "whole"),
        }

    def logprobs(self, learner):
        """Largest distance from plain log-probabilities, and what stands where none is wanted."""
        train, _ = self.batches[0]
        want, found = wanted(train), learner.logprobs(train)
        apart = float((found - plain_answers(train.batch, lora=self.lora))[want].abs().max())
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
        same = all(torch.equal(before[n], w) for n, w in copied(learner.weights()).items())
        return {"silent": stats == [None] * self.ranks.count, "silence_changes_nothing": same}

    def second_phase(self, *, fresh):
        """A phase with half the bound, after a step at rate 0 that filled Adam's moments.

        Returns:
            How far its first step is from the clipped gradient, and the norm it reports.
        """
        length = norm(self.gradient.values())
        policy, learner = self.learner(READABLE)
        learner.update(*self.batches[1], LOSS, 0.0)
        bounded = READABLE.model_copy(update={"max_grad_norm": length / 2})
        learner.begin_phase(bounded, fresh=fresh)
        before, after, stats = self.stepped(policy, learner, self.batches[0])
        clipped = {name: gradient / 2 for name, gradient in self.gradient.items()}
        apart = whole(gradient_of_step(before, after), clipped)
        return {"apart": apart, "reported": stats.grad_norm / length}

    def exported(self, policy, learner):
        """What is read back from an export, against what the learner answers."""
        learner.export(policy, self.folder)
        own = copied(learner.weights())
        loaded = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        twin = build_policy(MODEL, 5).model.eval()
        twin.load_state_dict(own, strict=False)
        weights = dict(loaded.named_parameters())
        self.ranks.barrier()
        return {
            "names": sorted(weights) == sorted(own),
            "weights": all(torch.equal(weights[n], own[n]) for n in own),
            "logits": torch.equal(logits(loaded), logits(twin)),
            "dtype": str(loaded.dtype),
        }

    def usual_steps(self):
        """Three usual steps against torch's own optimiser, and what is exported after them."""
        policy, learner = self.learner(USUAL)
        for train, old in self.batches:
            learner.update(train, old, LOSS, USUAL.learning_rate)
        apart = whole(copied(learner.weights()), plain_steps(self.batches, USUAL))
        return {"apart": apart, "export": self.exported(policy, learner)}

    def merged(self, policy, learner):
        """An export of adapters: merged, and alone over the model that they began from."""
        figures = self.exported(policy, learner)
        merged, base = build_policy(MODEL, 5).model, build_policy(MODEL, 0).model
        weights, frozen = copied(learner.weights()), dict(base.named_parameters())
        merged.load_state_dict(weights, strict=False)
        changed = [name for name, w in weights.items() if not torch.equal(w, frozen[name])]
        alone = peft.PeftModel.from_pretrained(base, self.folder / "adapter")
        expected = logits(plain_model(lora=True)[0])
        self.ranks.barrier()
        return {
            **figures,
            "apart": float((logits(merged) - expected).abs().max()),
            "alone_apart": float((logits(alone) - expected).abs().max()),
            "changed": sorted({name.split(".")[-2] for name in changed}),
        }

    def half_precision(self):
        """One step in bfloat16 against float32, and the type of what is exported."""
        policy, learner = self.learner(READABLE, "several", sgd, dtype="bfloat16")
        before, after, stats = self.stepped(policy, learner, self.batches[0])
        return {
            "loss": stats.loss / self.loss,
            "taken_off": whole(difference(before, after), self.taken_off),
            "buffers": sorted({str(b.dtype) for b in policy.model.buffers()}),
            "dtype": self.exported(policy, learner)["dtype"],
        }


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=torch.arange(4, 24)[None]).logits


def measure_stage(stage, ranks, batches, folder):
    bench = Bench(stage, ranks, batches, folder, lora=False)
    adapters = Bench(stage, ranks, batches, folder, lora=True)
    figures = {limit: bench.first_step(limit) for limit in LIMITS}
    figures["adapters"] = adapters.first_step("several")
    figures["fresh"] = bench.second_phase(fresh=True)
    figures["fresh adapters"] = adapters.second_phase(fresh=True)
    figures["carried"] = bench.second_phase(fresh=False)
    figures["usual_steps"] = bench.usual_steps()
    if ranks.count > 1:
        figures["one_tree"] = bench.one_tree()
    if stage == HALF:
        figures["bfloat16"] = bench.half_precision()
    return figures


def main(out):
    ranks = join_ranks(RunnerSpec(device=DEVICE))
    model = build_policy(MODEL, 0).model
    batches = tuple(train_batch(seed, model) for seed in (0, 100, 200))
    measured = {stage: measure_stage(stage, ranks, batches, out.parent) for stage in range(4)}
    if ranks.is_first:
        out.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
