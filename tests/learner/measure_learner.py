"""Measures the learner against plain PyTorch on every rank that torchrun started.

    python -m torch.distributed.run --standalone --nproc-per-node N measure_learner.py OUT STAGE...

One start makes all measurements, since starting costs more than they do; `test_learner.py` judges
them. The gradient is read off one step, whatever ZeRO stage holds it: plain SGD moves a
weight by lr · g, and AdamW with ε = 1 at first by lr · g / (|g| + 1), which can be inverted.
"""

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from rlx.importing import speed_up_imports

with speed_up_imports():
    import peft
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from rlx.batch import TokenBatch, build_token_batch
    from rlx.credit import Credit
    from rlx.learner import Critic, Learner, build_learner_with_reference, join_ranks
    from rlx.learner import learner as learner_engine
    from rlx.model import build_policy
    from rlx.model.lora import adapt_model, adapter_weights
    from rlx.phase_setup import CreditRules
    from rlx.plugin import Problem
    from rlx.rollout import NO_PARENT, RolloutTree, Segment, Span
    from rlx.spec import (
        CreditSpec,
        CriticSpec,
        Lora,
        LossSpec,
        OptimizerSpec,
        RunnerSpec,
        TinyModelSpec,
    )
    from rlx.spec.loss import EntropyBonus, ExpectedScore, KlPenalty
    from rlx.step import ScoredRows
from rlx.phase_setup import CreditRules
from rlx.step import ScoredRows, TokenStreams, assign_credit

MODEL = TinyModelSpec(
    hidden_size=64, heads=2, kv_heads=1, layers=2, intermediate_size=96, initializer_range=0.1
)
LOSS = LossSpec(
    clip=(0.2, 0.28),
    dual_clip=1.5,
    entropy=EntropyBonus(coefficient=0.01, span="confidence"),
    kl=KlPenalty(coefficient=0.1, kl_penalty="k3"),
)
CHOICES = {
    "values": LossSpec(ratio="sequence", expected=ExpectedScore(coefficient=3.0), per_turn=True),
    "longer values": LossSpec(expected=ExpectedScore(score="spherical"), aggregate="sequence_mean"),
}
VALUES = {
    "values": {"0.0": (30,), "0.3": (33,), "1.0": (40,)},
    # Those of 1 begin those of 1., so that all are told apart by what closes them.
    "longer values": {"1": (42, 11), "1.": (42, 27, 11), ".5": (27, 46, 11), "0.9": (39, 11)},
}
"""Texts of confidences and their tokens; 11 is `</confidence>`."""
VALUE_CLIP = 0.1
TEMPERATURES = {"answer": 1.0, "confidence": 0.7}
LR = 1e4
"""So large that rounding of the weights themselves does not show in what they moved by."""
READABLE = OptimizerSpec(learning_rate=LR, eps=1.0, max_grad_norm=1e6)
USUAL = OptimizerSpec(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5)
DEVICE = os.environ.get("RLX_TEST_DEVICE", "cpu")
if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
    DEVICE = "cpu"  # ranks do not share a device
LIMITS = {"several": 84, "cut": 60}
"""Tokens per micro-batch: several rows, and so few that trees are cut."""
SYSTEM = (16, 17, 18)
"""Tokens with which all prompts begin."""
LORA = Lora(rank=4, alpha=6)
EXTREMES = {1: (0,), 2: (3,)} if DEVICE == "cpu" else {1: (0, 3), 2: (0, 3)}
"""By number of ranks, the ZeRO stages at which everything is tried: none or all is sharded."""
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
        whole = Span((0, len(ids)), (0, len(ids)), "")
        return Segment(
            parent=parent,
            author="policy",
            token_ids=ids,
            turn=number,
            kind=kind,
            logprobs=logprobs,
            spans={kind: whole},
        )

    trees = []
    for n in range(count):
        segments = [Segment(parent=NO_PARENT, author="prompt", token_ids=(*SYSTEM, *tokens(3, 12)))]
        answers = [tokens(1, 4 + 5 * n) for _ in range(2)]
        for ids in (*answers, answers[0]):
            segments.append(turn(0, 1, "answer", ids))
            answer = len(segments) - 1
            segments.append(Segment(parent=answer, author="prompt", token_ids=(2, 14, 15)))
            question = len(segments) - 1
            segments += [turn(question, 2, "confidence", tokens(1, 4)) for _ in range(2)]
        trees.append(RolloutTree(Problem(id=str(n), prompt="", fields={}), tuple(segments)))
    return trees


def train_batch(seed, model, loss=LOSS, confidences=()):
    """A batch with clipped and unclipped tokens, silent rows, and NaN where nobody may look."""
    batch = build_token_batch(rollout_trees(seed), temperatures=TEMPERATURES)
    generator = torch.Generator().manual_seed(seed + 1)
    shape = batch.token_ids.shape
    advantages = torch.randn(shape[0], 1, generator=generator).expand(shape)
    silent = torch.rand(shape[0], 1, generator=generator) < 0.2
    mask = batch.is_own
    with torch.no_grad():
        logprobs, _ = plain_logprobs(model, batch)
    noise = 0.3 * torch.randn(3, *shape, generator=generator)
    old, reference = ((logprobs + n).where(mask, torch.nan) for n in noise[:2])
    values = noise[2].where(mask, torch.nan)
    returns = torch.rand(shape, generator=generator).where(mask, 0.0)
    none = torch.zeros(shape[0], 2)
    labels = torch.rand(shape[0], generator=generator).mul(3).floor()
    return assign_credit(
        ScoredRows.join(
            batch,
            mask,
            turn_rewards=none,
            turn_present=none.bool(),
            global_rewards=none[:, 0],
            labels=labels.where(labels < 2, torch.nan),
        ),
        TokenStreams(
            old_logprobs=old, optional={"reference_logprobs": reference, "values": values}
        ),
        CreditRules(
            estimator=lambda _: Credit(
                advantages=advantages.where(mask & ~silent, 0.0), returns=returns
            ),
            credit=CreditSpec(),
            loss=loss,
            max_tokens={"answer": 30, "confidence": 4},
            confidences=tuple(confidences),
        ),
    )


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


def plain_row(new, old, reference, advantages, loss):
    """`[n]` token losses of one row, which of them are held at a bound, and their penalties."""
    log_ratio = new - old
    if loss.ratio == "sequence":
        log_ratio = log_ratio.mean().expand(len(new))
    ratio, (low, high) = log_ratio.exp(), loss.clip
    bounded = ratio.clamp(1 - low, 1 + high)
    losses = -torch.min(ratio * advantages, bounded * advantages)
    bad, most = advantages < 0, loss.dual_clip or torch.inf
    if loss.dual_clip is not None:
        losses = torch.where(bad, torch.min(losses, -most * advantages), losses)
    held = torch.where(bad, (ratio < 1 - low) | (ratio > most), ratio > 1 + high)
    held = held & (advantages != 0)
    if loss.kl is None:
        return losses, held, torch.zeros_like(losses)
    x = new - reference
    penalties = (-x).exp() + x - 1
    return losses + loss.kl.coefficient * penalties, held, penalties


def plain_loss(model, train, loss):
    """The loss, the tokens held at a bound, and the weighted sum of penalties, row by row."""
    logprobs, entropy = plain_logprobs(model, train.batch)
    total, held, penalty = -(train.entropy_weights * entropy).sum(), 0, 0.0
    for b, own in enumerate(train.mask):
        streams = (
            train.streams.old_logprobs,
            train.streams.get("reference_logprobs"),
            train.advantages,
        )
        row = plain_row(logprobs[b, own], *(stream[b, own] for stream in streams), loss)
        weights = train.weights[b, own]
        total = total + (weights * row[0]).sum()
        held += int((row[1] & train.wanted[b, own]).sum())
        penalty += float((weights * row[2]).sum())
    if train.expected is not None:
        total = total - plain_expectation(model, train, loss)
    return total, held, penalty


def plain_expectation(model, train, loss):
    """Σ weight · Σᵥ P(v) · score(v), every value of every row in a forward of its own."""
    expected, total = train.expected, 0.0
    (values,) = (VALUES[name] for name in VALUES if CHOICES[name] is loss)
    for row, start, scores in zip(expected.rows, expected.starts, expected.scores, strict=True):
        weight = loss.expected.coefficient * train.weights[row, start]
        temperature = train.batch.temperatures[row, start]
        for score, tokens in zip(scores, values.values(), strict=True):
            ids = torch.tensor([*train.batch.token_ids[row, :start].tolist(), *tokens])
            logits = model(input_ids=ids[None]).logits[0, start - 1 : -1]
            logprobs = torch.log_softmax(logits / temperature, dim=-1)
            stated = logprobs.gather(1, torch.tensor(tokens)[:, None]).sum().exp()
            total = total + weight * score * stated
    return total


@functools.cache
def plain_step(train, loss, *, lora):
    """Figures, and gradient by name."""
    model, learned = plain_model(lora=lora)
    total, held, penalty = plain_loss(model, train, loss)
    total.backward()
    gradient = {name: p.grad for name, p in learned.items()}
    figures = {
        "loss": float(total.detach()),
        "clip_fraction": held / int(train.wanted.sum()),
        "grad_norm": norm(gradient.values()),
    }
    if loss.kl is not None:
        figures["kl_loss"] = penalty / float(train.weights.sum())
    return figures, gradient


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
    for train in batches:
        adam.zero_grad()
        plain_loss(model, train, LOSS)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
        adam.step()
    return copied(dict(model.named_parameters()))


def plain_critic(train, head, clip):
    """Figures, gradient by name, and `[B, T]` values of a critic with this head."""
    decoder, batch = build_policy(MODEL, 0).model.get_decoder(), train.batch
    weight, bias = (head[f"head.{name}"].requires_grad_() for name in ("weight", "bias"))
    states = decoder(input_ids=batch.token_ids, attention_mask=batch.is_token.long())
    values = torch.nn.functional.pad(states.last_hidden_state[:, :-1] @ weight + bias, (1, 0))
    new, old, returns = (
        x[train.mask] for x in (values, train.streams.get("values"), train.returns)
    )
    squares = (new - returns) ** 2
    held = torch.zeros_like(squares, dtype=torch.bool)
    if clip is not None:
        near = torch.max(torch.min(new, old + clip), old - clip)
        held = (near - returns) ** 2 > squares
        squares = torch.where(held, (near - returns) ** 2, squares)
    loss = squares.mean() / 2
    loss.backward()
    gradient = {f"model.{name}": p.grad for name, p in decoder.named_parameters()}
    gradient |= {"head.weight": weight.grad, "head.bias": bias.grad}
    figures = {
        "loss": loss.item(),
        "clip_fraction": held.double().mean().item(),
        "value": new.mean().item(),
        "explained_variance": 1 - ((returns - new).var() / returns.var()).item(),
        "grad_norm": norm(gradient.values()),
    }
    return figures, gradient, values.detach()


# The learner -------------------------------------------------------------------------------------


def copied(weights):
    return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}


def difference(before, after):
    return {name: before[name].double() - after[name].detach().cpu().double() for name in before}


def scaled(gradient):
    """What a step of SGD takes off."""
    return {name: LR * g for name, g in gradient.items()}


def sgd(parameters, spec):
    return torch.optim.SGD(parameters, lr=spec.learning_rate)


def gradient_of_step(before, after):
    gradient = {}
    for name, distance in difference(before, after).items():
        moved = distance / LR
        gradient[name] = (moved / (1 - moved.abs())).float()
    return gradient


def critic_weights(critic):
    engine = critic.engine
    return copied(
        {name: engine.gather_parameter(p) for name, p in engine._module.named_parameters()}
    )


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
        self.plain, self.gradient = plain_step(batches[0], LOSS, lora=lora)

    def policy(self):
        policy = build_policy(MODEL, 0)
        for layer in policy.model.model.layers:
            layer.self_attn.attention_dropout = DROPOUT
        if self.lora:
            adapt_model(policy.model, LORA, 0)
            fill(adapter_weights(policy.model))
        return policy

    def runner(self, limit, **options):
        tokens = LIMITS[limit]
        return RunnerSpec(
            zero_stage=self.stage, micro_batch_tokens=tokens, device=DEVICE, **options
        )

    def learner(self, optimizer, limit="several", make=learner_engine.build_adamw, **options):
        policy, runner = self.policy(), self.runner(limit, **options)
        with patch.object(learner_engine, "build_adamw", make):
            return policy, Learner(policy, runner, optimizer, self.ranks)

    def read(self, policy, learner):
        """Whole values of what learns. An adapter is read from the files of an export."""
        if not self.lora:
            return copied(dict(learner.iterate_weights()))
        learner.export(policy, self.folder)
        read = load_file(self.folder / "adapter" / "adapter_model.safetensors")
        self.ranks.barrier()
        return read

    def stepped(self, policy, learner, train, loss=LOSS):
        """What learns, before and after one step, and the step's figures."""
        before = self.read(policy, learner)
        stats = learner.update(train, loss, LR)
        return before, self.read(policy, learner), stats

    def first_step(self, limit, **options):
        """A step of SGD, after asking for log-probabilities and an update without any signal."""
        policy, learner = self.learner(READABLE, limit, sgd, **options)
        quiet = {**self.logprobs(learner), **self.silence(learner)}
        before, after, stats = self.stepped(policy, learner, self.batches[0])
        everywhere = self.ranks.gather(copied(dict(learner.iterate_weights())))
        return {
            **quiet,
            "worst": worst(difference(before, after), scaled(self.gradient)),
            "found": {name: getattr(stats, name) for name in self.plain},
            "plain": self.plain,
            "bonus_entropy": stats.bonus_entropy,
            "computed_tokens": stats.computed_tokens,
            "row_tokens": stats.row_tokens,
            "form": learner.chosen.form.name,
            "ranks_agree": all(torch.equal(w[n], everywhere[0][n]) for w in everywhere for n in w),
        }

    def one_row(self):
        """A step of SGD on a single row: of two ranks, one has nothing but a filler."""
        train = self.batches[0]
        first = torch.arange(len(train.wanted))[:, None] == train.wanted.any(dim=1).nonzero()[0]
        alone = replace(
            train,
            advantages=train.advantages.where(first, 0.0),
            weights=train.weights.where(first, 0.0),
            entropy_weights=train.entropy_weights.where(first, 0.0),
            wanted=train.wanted & first,
        )
        before, after, _ = self.stepped(*self.learner(READABLE, "several", sgd), alone)
        _, gradient = plain_step(alone, LOSS, lora=self.lora)
        return {"apart": whole(difference(before, after), scaled(gradient))}

    def logprobs(self, learner):
        """Largest distance from plain log-probabilities, and what stands where none is wanted."""
        train = self.batches[0]
        want, found = train.wanted, learner.logprobs(train.batch, train.wanted)
        apart = float((found - plain_answers(train.batch, lora=self.lora))[want].abs().max())
        return {"logprobs_apart": apart, "logprobs_outside": float(found[~want].abs().max())}

    def silence(self, learner):
        """Whether an update without signal is None on every rank and changes nothing."""
        train, before = self.batches[0], copied(dict(learner.iterate_weights()))
        nothing = replace(
            train,
            advantages=torch.zeros_like(train.advantages),
            entropy_weights=torch.zeros_like(train.entropy_weights),
            wanted=torch.zeros_like(train.wanted),
        )
        stats = self.ranks.gather(learner.update(nothing, LOSS, LR))
        same = all(
            torch.equal(before[n], w) for n, w in copied(dict(learner.iterate_weights())).items()
        )
        return {"silent": stats == [None] * self.ranks.count, "silence_changes_nothing": same}

    def second_phase(self, *, fresh):
        """A phase with half the bound, after a step at rate 0 that filled Adam's moments.

        Returns:
            How far its first step is from the clipped gradient, and the norm it reports.
        """
        length = norm(self.gradient.values())
        policy, learner = self.learner(READABLE)
        learner.update(self.batches[1], LOSS, 0.0)
        bounded = READABLE.model_copy(update={"max_grad_norm": length / 2})
        learner.begin_phase(bounded, fresh=fresh)
        before, after, stats = self.stepped(policy, learner, self.batches[0])
        clipped = {name: gradient / 2 for name, gradient in self.gradient.items()}
        apart = whole(gradient_of_step(before, after), clipped)
        return {"apart": apart, "reported": stats.grad_norm / length}

    def exported(self, policy, learner):
        """What is read back from an export, against what the learner answers."""
        learner.export(policy, self.folder)
        own = copied(dict(learner.iterate_weights()))
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

    def usual_steps(self, **options):
        """Three usual steps against torch's own optimiser, and what is exported after them."""
        policy, learner = self.learner(USUAL, **options)
        for train in self.batches:
            learner.update(train, LOSS, USUAL.learning_rate)
        apart = whole(copied(dict(learner.iterate_weights())), plain_steps(self.batches, USUAL))
        return {"apart": apart, "export": self.exported(policy, learner)}

    def choice(self, train, loss):
        """A step of SGD down another loss."""
        plain, gradient = plain_step(train, loss, lora=self.lora)
        before, after, stats = self.stepped(*self.learner(READABLE, "cut", sgd), train, loss)
        return {
            "worst": worst(difference(before, after), scaled(gradient)),
            "found": {name: getattr(stats, name) for name in plain},
            "plain": plain,
            "expected_score": stats.expected_score,
            "stated_mass": stats.stated_mass,
        }

    def reference(self, **options):
        """Log-probabilities of the reference before and after a step, and the gradient of that."""
        policy, train = self.policy(), self.batches[0]
        learner, reference = build_learner_with_reference(
            policy, self.runner("several", **options), READABLE, self.ranks
        )
        own = learner.logprobs(train.batch, train.mask)
        first = reference.logprobs(train.batch, train.mask)
        before, after, _ = self.stepped(policy, learner, train)
        apart = first - plain_answers(train.batch, lora=False)
        return {
            "described": reference.description,
            "own_apart": float((first - own).abs().max()),
            "base_apart": float(apart[train.mask].abs().max()),
            "outside": float(first[~train.mask].abs().max()),
            "stays": torch.equal(reference.logprobs(train.batch, train.mask), first),
            "gradient_apart": whole(gradient_of_step(before, after), self.gradient),
            "moved": float((learner.logprobs(train.batch, train.mask) - own).abs().max()),
        }

    def critic(self, limit, clip):
        """A critic's values and a step of SGD, while a learner of the same process takes one."""
        train, policy = self.batches[0], self.policy()
        spec, runner = CriticSpec(value_clip=clip, max_grad_norm=1e6), self.runner(limit)
        with patch.object(learner_engine, "build_adamw", sgd):
            critic = Critic(policy, runner, spec, self.ranks, 0)
            learner = Learner(policy, runner, READABLE, self.ranks)
        before = critic_weights(critic)
        head = {name: before[name].float().clone() for name in ("head.weight", "head.bias")}
        plain, gradient, expected = plain_critic(train, head, clip)
        nothing = replace(train, mask=torch.zeros_like(train.mask))
        silent = critic.update(nothing, LR) is None
        values = critic.values(train.batch, train.mask)
        theirs = self.stepped(policy, learner, train)
        stats = critic.update(train, LR)
        found = difference(before, critic_weights(critic))
        return {
            "values_apart": float((values - expected)[train.mask].abs().max()),
            "values_outside": float(values[~train.mask].abs().max()),
            "worst": worst(found, scaled(gradient)),
            "found": {name: getattr(stats, name) for name in plain},
            "plain": plain,
            "rate": stats.learning_rate,
            "silent": silent,
            "learner_apart": whole(difference(*theirs[:2]), scaled(self.gradient)),
        }

    def half_precision(self):
        """One step in bfloat16 against float32, and the type of what is exported."""
        policy, learner = self.learner(READABLE, "several", sgd, dtype="bfloat16")
        before, after, stats = self.stepped(policy, learner, self.batches[0])
        return {
            "loss": stats.loss / self.plain["loss"],
            "apart": whole(difference(before, after), scaled(self.gradient)),
            "buffers": sorted({str(b.dtype) for b in policy.model.buffers()}),
            "dtype": self.exported(policy, learner)["dtype"],
        }


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=torch.arange(4, 24)[None]).logits


def measure_stage(stage, ranks, batches, chosen, folder):
    bench = Bench(stage, ranks, batches, folder, lora=False)
    adapters = Bench(stage, ranks, batches, folder, lora=True)
    figures = {limit: bench.first_step(limit) for limit in LIMITS}
    figures["adapters"] = adapters.first_step("several")
    extreme = stage in EXTREMES[ranks.count]
    if extreme:
        figures["recomputed"] = bench.first_step("several", activation_checkpointing=True)
        figures |= {name: bench.choice(chosen[name], loss) for name, loss in CHOICES.items()}
    if stage:
        figures["offloaded"] = bench.usual_steps(offload_optimizer=True)
    figures["fresh"] = bench.second_phase(fresh=True)
    figures["carried"] = bench.second_phase(fresh=False)
    figures["usual_steps"] = bench.usual_steps()
    figures["frozen copy"] = bench.reference()
    figures["adapter-free"] = adapters.reference()
    figures["critic cut"] = bench.critic("cut", VALUE_CLIP)
    if extreme:
        figures["critic several"] = bench.critic("several", None)
    if ranks.count > 1:
        figures["one_row"] = bench.one_row()
    if stage == HALF:
        figures["bfloat16"] = bench.half_precision()
        figures["bfloat16 reference"] = bench.reference(dtype="bfloat16")
    return figures


def main(out, stages):
    ranks = join_ranks(RunnerSpec(device=DEVICE))
    model = build_policy(MODEL, 0).model
    batches = tuple(train_batch(seed, model) for seed in (0, 100, 200))
    chosen = {name: train_batch(0, model, loss, VALUES[name]) for name, loss in CHOICES.items()}
    folder = out.parent
    measured = {s: measure_stage(s, ranks, batches, chosen, folder) for s in stages}
    if ranks.is_first:
        out.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(stage) for stage in sys.argv[2:]])
