"""The reference policy, which stays as it was, and how long an update of the policy takes."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.learner.distributed import Ranks
from rlx.learner.forward import PackedPolicy, choose_form, choose_logits
from rlx.learner.learner import Learner, build_adamw, build_logprob_function, shard_frozen_module
from rlx.learner.pack import RankMicroBatches
from rlx.model import (
    Policy,
    copy_model,
    disable_adapters,
    is_adapted,
    share_model,
)
from rlx.spec import OptimizerSpec, RunnerSpec


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
        return share.gather_token_values(build_logprob_function(self._module, batch))


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
    compute_logprobs = build_logprob_function(module, batch)

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
