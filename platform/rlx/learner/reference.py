"""The reference policy for KL: a frozen copy of the initial policy, or the model without its
adapters."""

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.learner.choice import choose_form, choose_logits
from rlx.learner.distributed import Ranks
from rlx.learner.engine import shard_frozen_module
from rlx.learner.forward import PackedPolicy
from rlx.learner.learner import Learner
from rlx.learner.pack import PackedBatch, RankMicroBatches
from rlx.model import Policy, copy_model, is_adapted, share_model
from rlx.spec import OptimizerSpec, RunnerSpec


class ReferencePolicy(Protocol):
    """A policy that does not change during training.

    Attributes:
        description: which policy it is, for the run's record.
    """

    description: ClassVar[str]

    def logprobs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        """`[B, T]` nats, as `Learner.logprobs`."""
        ...


class FrozenCopy:
    """A copy of the policy at the time of construction.

    Args:
        policy: must not have a learner yet, which may shard or round its weights; not modified.
        runner: precision and micro-batch size.
        ranks: each rank computes its share of the rows. It holds a full copy on its device; under
            ZeRO stage 3 its part of every weight.
    """

    description: ClassVar[str] = "a frozen copy of the policy from the start of training"

    def __init__(self, policy: Policy, runner: RunnerSpec, ranks: Ranks) -> None:
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
        """`[B, T]` nats, as `Learner.logprobs`."""

        def compute_reference_logprobs(packed: PackedBatch) -> Tensor:
            return torch.as_tensor(
                self._module(packed, packed.gather_targets(batch.temperatures))[0]
            )

        share = RankMicroBatches(batch, want, self._limit, self._ranks, merge=self._merges)
        return share.gather_token_values(compute_reference_logprobs)


class AdapterFreeBase:
    """The learner's model with its adapters disabled; needs no extra memory."""

    description: ClassVar[str] = "the model without its adapters"

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def logprobs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        """`[B, T]` nats, as `Learner.logprobs`."""
        return self._learner.reference_logprobs(batch, want)


def build_learner_with_reference(
    policy: Policy, runner: RunnerSpec, optimizer: OptimizerSpec, ranks: Ranks
) -> tuple[Learner, ReferencePolicy]:
    """Builds a learner and its reference policy: the model without adapters, or a frozen copy.

    The copy must be made before the learner shards the model, so both are built here.
    """
    frozen = None if is_adapted(policy.model) else FrozenCopy(policy, runner, ranks)
    learner = Learner(policy, runner, optimizer, ranks)
    return learner, AdapterFreeBase(learner) if frozen is None else frozen
