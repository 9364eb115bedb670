"""The learner, which updates the policy, and the reference policy, which stays as it was."""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.learner.distributed import Ranks
from rlx.learner.engine import TrainingEngine, build_adamw, shard_frozen_module
from rlx.learner.forward import PackedPolicy, choose_form, choose_logits
from rlx.learner.pack import Branches, PackedBatch, RankMicroBatches
from rlx.learner.terms import (
    UpdateStats,
    UpdateSums,
    UpdateTargets,
    build_confidence_branches,
    encode_confidences,
    expected_score_term,
    policy_term,
)
from rlx.model import (
    Policy,
    adapter_weights,
    copy_model,
    disable_adapters,
    is_adapted,
    iterate_merged_weights,
    share_model,
    write_model,
)
from rlx.spec import LossSpec, OptimizerSpec, RunnerSpec
from rlx.train_batch import TrainBatch


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of a phase of `steps` steps."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.learning_rate
    progress = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    fall = progress if spec.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return spec.learning_rate * (1 + (spec.final_fraction - 1) * fall)


class Learner:
    """Owns the trained weights and their optimizer.

    Args:
        policy: the model to train; moved to the rank's device. Parameters without `requires_grad`,
            such as the base weights of adapters, are frozen.
        optimizer: settings of the first phase.

    Attributes:
        chosen: how packed rows are computed, and why.
        model: the trained model.
        engine: holds the weights and their optimizer.
    """

    def __init__(
        self,
        policy: Policy,
        runner: RunnerSpec,
        optimizer: OptimizerSpec,
        ranks: Ranks,
    ) -> None:
        self._runner = runner
        self._ranks = ranks
        self.model = policy.model
        self._dialogue = policy.dialogue
        self._peak_rate = optimizer.learning_rate
        module = PackedPolicy(policy.model.eval())
        if runner.activation_checkpointing:
            module.recompute_layers()
        chosen = choose_form(module, ranks)
        self.chosen = replace(chosen, logits=choose_logits(module, runner, ranks))
        self.engine = TrainingEngine(module, optimizer, runner, ranks, section="optimizer")

    def begin_phase(self, optimizer: OptimizerSpec, *, fresh: bool) -> None:
        """Applies a phase's optimizer settings; `fresh` resets Adam's moments."""
        self._peak_rate = optimizer.learning_rate
        self.engine.begin_phase(optimizer, fresh=fresh)

    def update(self, train: TrainBatch, loss: LossSpec, rate: float) -> UpdateStats | None:
        """Takes one optimizer step on a batch that is the same on every rank.

        Returns:
            Statistics, the same on every rank; None if no token carries a signal, in which case no
                rank is updated.

        Raises:
            RlxError: the gradient is not finite.
            SpecError: the tokenizer cannot state the confidences of `loss.expected`.
            ValueError: the loss has a KL penalty but the batch has no reference log-probabilities.
        """
        confidences = None
        if train.expected is not None and loss.expected is not None:
            values, span = train.expected.values, loss.expected.span
            tokens = encode_confidences(values, span, self._dialogue)
            confidences = build_confidence_branches(train, tokens)
        branches = None if confidences is None else confidences.branches
        share = self._share(train.batch, train.wanted, branches)
        if not share:
            return None
        sums = UpdateSums()
        falls = loss.entropy is not None and loss.entropy.schedule == "learning_rate"
        bonus_scale = rate / self._peak_rate if falls else 1.0

        def compute_policy_loss(packed: PackedBatch) -> Tensor:
            temperatures = train.batch.temperatures
            starts = None
            if confidences is not None:
                starts = packed.branches.gather_starts(temperatures)
            logprobs, entropy, *branches = self.engine(
                packed,
                packed.gather_targets(temperatures),
                starts,
                learns_entropy=loss.entropy is not None,
            )
            targets = UpdateTargets.from_packed(packed, train, loss, bonus_scale)
            term = policy_term(logprobs, entropy, targets, loss, sums)
            if confidences is not None:
                term = term + expected_score_term(branches[0], packed, confidences, sums)
            return term

        norm = self.engine.step(share, compute_policy_loss, rate)
        sums.read_kept()
        return UpdateSums.sum_over_ranks(self._ranks.gather(sums)).stats(
            grad_norm=norm,
            learning_rate=rate,
            computed_tokens=share.computed_tokens,
            row_tokens=share.row_tokens,
        )

    def _share(
        self, batch: TokenBatch, want: Tensor, branches: Branches | None = None
    ) -> RankMicroBatches:
        limit, merge = self._runner.micro_batch_tokens, self.chosen.form.merges
        return RankMicroBatches(batch, want, limit, self._ranks, merge=merge, branches=branches)

    def logprobs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        """Computes log-probabilities of tokens under the current policy, at the sampler's
        temperatures.

        Args:
            batch: all rows of the step, the same on every rank.
            want: `[B, T]` bool, the tokens to compute; never the first of a row.

        Returns:
            `[B, T]` nats, on every rank; 0 where not wanted.
        """
        ask = _build_logprob_function(self.engine, batch)
        return self._share(batch, want).gather_token_values(ask)

    def collision_probs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        """Computes Σ π² of the distributions from which tokens are drawn, like `logprobs`."""

        def compute_collision_probs(packed: PackedBatch) -> Tensor:
            temperatures = packed.gather_targets(batch.temperatures)
            return torch.as_tensor(self.engine(packed, temperatures, with_collisions=True)[2])

        return self._share(batch, want).gather_token_values(compute_collision_probs)

    def iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full weights under the plain model's names, adapters merged; every rank must take
        all.

        Under ZeRO stage 3 each is gathered when it is due, so that the device holds one at a time.
        """
        return iterate_merged_weights(self.model, self.engine.gather_parameter)

    def adapter(self) -> Mapping[str, Tensor]:
        """Returns A and B of every adapted layer under peft's checkpoint names, on every rank."""
        return adapter_weights(self.model, self.engine.gather_parameter)

    def export(self, policy: Policy, folder: Path) -> None:
        """Writes weights, and an adapter also separately, as `write_model` does, atomically, from
        rank 0."""
        weights = {n: w.cpu() for n, w in self.iterate_weights() if self._ranks.is_first}
        adapter = self.adapter()
        if self._ranks.is_first:
            aside = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(aside, ignore_errors=True)
            write_model(policy, weights, adapter, aside)
            shutil.rmtree(folder, ignore_errors=True)
            aside.replace(folder)
        self._ranks.barrier()


def _build_logprob_function(
    module: Callable[..., Sequence[Tensor]], batch: TokenBatch
) -> Callable[[PackedBatch], Tensor]:
    return lambda packed: module(packed, packed.gather_targets(batch.temperatures))[0]


class FrozenCopy:
    """A copy of a policy at the time of construction.

    The policy must not have a learner yet, which may shard or round its weights. Each rank holds a
    full copy on its device; under ZeRO stage 3 its part of every weight.
    """

    def __init__(self, policy: Policy, runner: RunnerSpec, ranks: Ranks, description: str) -> None:
        self.description = description
        self._limit = runner.micro_batch_tokens
        self._ranks = ranks
        dtype, is_sharded = getattr(torch, runner.dtype), runner.zero_stage == 3
        model = policy.model
        model = share_model(model) if is_sharded else copy_model(model, ranks.device, dtype)
        module = PackedPolicy(model.eval().requires_grad_(False))
        self._merges = choose_form(module, ranks).form.merges
        choose_logits(module, runner, ranks)
        self._module = shard_frozen_module(module, runner, ranks) if is_sharded else module

    def logprobs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        share = RankMicroBatches(batch, want, self._limit, self._ranks, merge=self._merges)
        return share.gather_token_values(_build_logprob_function(self._module, batch))


class AdapterFreeBase:
    """The learner's model with its adapters disabled; needs no extra memory."""

    description = "the model without its adapters"

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def logprobs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        with disable_adapters(self._learner.model):
            return self._learner.logprobs(batch, want)


ReferencePolicy = FrozenCopy | AdapterFreeBase
"""A policy that does not change during training; its `description` is for the run's record."""


def build_learner_with_reference(
    policy: Policy,
    runner: RunnerSpec,
    optimizer: OptimizerSpec,
    ranks: Ranks,
    teacher: Policy | None = None,
) -> tuple[Learner, ReferencePolicy]:
    """Builds a learner and its reference policy: the teacher, else the model without adapters, else
    a frozen copy, which must be made before the learner shards the model."""
    frozen = None
    if teacher is not None:
        frozen = FrozenCopy(teacher, runner, ranks, "model.reference")
    elif not is_adapted(policy.model):
        start = "a frozen copy of the policy from the start of training"
        frozen = FrozenCopy(policy, runner, ranks, start)
    learner = Learner(policy, runner, optimizer, ranks)
    return learner, AdapterFreeBase(learner) if frozen is None else frozen


@dataclass(frozen=True, slots=True)
class UpdateSeconds:
    """What parts of an update take on one device, in seconds by the clock.

    Attributes:
        forward: log-probabilities of the wanted tokens, without a gradient.
        gradient: the gradient of their sum.
        optimizer: a step of AdamW.
    """

    forward: float
    gradient: float
    optimizer: float


def time_update(
    policy: Policy,
    batch: TokenBatch,
    want: Tensor,
    runner: RunnerSpec,
    optimizer: OptimizerSpec,
    device: torch.device,
) -> UpdateSeconds:
    """Times an update in the form that the learner would choose, without a process group.

    The policy's model is moved to the device and gets gradients; its weights stay as they are.
    `want` (`[B, T]` bool) has at least one token.

    Raises:
        SpecError: the model cannot compute plain rows. torch.OutOfMemoryError: the device has no
            room for gradients and optimizer state.
    """
    ranks = Ranks(rank=0, count=1, device=device)
    module = PackedPolicy(policy.model.to(device).eval())
    if runner.activation_checkpointing:
        module.recompute_layers()
    merges = choose_form(module, ranks).form.merges
    choose_logits(module, runner, ranks)
    share = RankMicroBatches(batch, want, runner.micro_batch_tokens, ranks, merge=merges)
    adamw = build_adamw(module.parameters(), optimizer.model_copy(update={"learning_rate": 0.0}))
    compute_logprobs = _build_logprob_function(module, batch)

    def compute_gradient() -> None:
        for packed in share:
            compute_logprobs(packed).sum().backward()

    def take_time(act: Callable[[], object]) -> float:
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    compute_logprobs(next(iter(share)))  # what only a first call does
    seconds = UpdateSeconds(
        forward=take_time(lambda: share.gather_token_values(compute_logprobs)),
        gradient=take_time(compute_gradient),
        optimizer=take_time(adamw.step),
    )
    module.zero_grad()
    module.keep_activations()
    return seconds
