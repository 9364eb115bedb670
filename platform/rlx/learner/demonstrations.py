"""Supervised training on demonstrations by several ranks, each of which holds a part of every
weight (ZeRO stage 3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.learner.choice import choose_form, choose_logits
from rlx.learner.distributed import Ranks
from rlx.learner.engine import TrainingEngine
from rlx.learner.forward import PackedPolicy
from rlx.learner.pack import PackedBatch, RankMicroBatches
from rlx.model import (
    DemonstrationBatches,
    Policy,
    WarmStartProgress,
    iterate_merged_weights,
    share_model,
)
from rlx.spec import OptimizerSpec, RunnerSpec

__all__ = ["train_on_demonstrations"]


@dataclass(frozen=True, eq=False, slots=True)
class _Demonstrations:
    """Rows of tokens, each a tree of its own; see `rlx.learner.pack.TokenRows`."""

    token_ids: Tensor
    is_token: Tensor
    tree_ids: Tensor


def train_on_demonstrations(
    policy: Policy,
    batches: DemonstrationBatches,
    progress: WarmStartProgress,
    runner: RunnerSpec,
    ranks: Ranks,
) -> None:
    """Trains a policy in float32; every rank calls it and computes its share of the rows.

    Loss and update are those of one process, to rounding: sums over rows have another order.

    Args:
        policy: without adapters. On rank 0 its model ends with the new weights, on the CPU; on
            other ranks it is left as it was.
        batches: what is learned.
        progress: called with (step, steps, loss) after every step.
        runner: micro-batch size, and whether activations are kept and the optimizer is on the host.
        ranks: from `join_ranks`.
    """
    warm = batches.warm
    runner = runner.model_copy(update={"dtype": "float32", "zero_stage": 3})
    optimizer = OptimizerSpec(
        learning_rate=warm.learning_rate,
        betas=warm.betas,
        weight_decay=warm.weight_decay,
        max_grad_norm=warm.max_grad_norm,
    )
    # What DeepSpeed shards is not used again: the learner shards the model in its own precision.
    model = share_model(policy.model)
    module = PackedPolicy(model.eval())
    if runner.activation_checkpointing:
        module.recompute_layers()
    merges = choose_form(module, ranks).form.merges
    choose_logits(module, runner, ranks)
    engine = TrainingEngine(module, optimizer, runner, ranks, section="model.warm_start")
    for step in range(warm.steps):
        ids, want = batches.build(step)
        want[:, 0] = False  # nothing is before it
        rows = _Demonstrations(ids, _mark_tokens(want), torch.arange(len(ids)))
        share = RankMicroBatches(rows, want, runner.micro_batch_tokens, ranks, merge=merges)
        loss = _take_step(engine, share, int(want.sum()), batches.compute_rate(step))
        progress(step + 1, warm.steps, sum(ranks.gather(loss)))
    own = dict(policy.model.named_parameters())
    for name, weight in iterate_merged_weights(model, engine.gather_parameter):
        if ranks.is_first:
            own[name].data = weight.to("cpu", copy=True)
    engine.close()


def _take_step(engine: TrainingEngine, share: RankMicroBatches, count: int, rate: float) -> float:
    """Takes one step on the mean over `count` tokens of all ranks; returns this rank's part of the
    loss, in nats."""
    losses = [0.0]

    def compute_loss(packed: PackedBatch) -> Tensor:
        logprobs = engine(packed, torch.ones(len(packed.targets), device=packed.targets.device))[0]
        loss = -torch.as_tensor(logprobs).sum() / count
        losses.append(float(loss.detach()))
        return loss

    engine.step(share, compute_loss, rate)
    return sum(losses)


def _mark_tokens(want: Tensor) -> Tensor:
    """`[B, T]` bool, True up to the last token of every row that is wanted; what comes after it
    changes nothing."""
    return want.flip(1).cumsum(1).flip(1) > 0
