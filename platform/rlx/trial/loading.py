"""Memory while a model is loaded: on the host of a machine, and on the device of each rank.

Weights in the precision of training are pages of the model's files, which the ranks of a machine
share. From there they go to the device one by one. What DeepSpeed then makes of them is counted
from its source; a test compares it with what ranks take.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlx.spec import RunnerSpec
from rlx.trial.budget import (
    BUCKET,
    MemoryEstimate,
    estimate_step_memory,
    estimate_update_bytes,
)
from rlx.trial.model_shape import ModelShape
from rlx.trial.token_counts import TokenBudget

if TYPE_CHECKING:  # it imports torch
    from rlx.trial.synthetic_rollouts import PlanTrial

__all__ = ["LoadingMemory", "estimate_loading", "estimate_memory"]

TRIAL_LAYERS, TRIAL_TOKENS, TRIAL_TARGETS = 2, 954, 115
"""The trial of forms (`rlx.learner.choice`): layers of its copy, for models whose layers are all of
one kind; tokens of its rows, filled up; tokens whose logits are computed."""
EMBEDDING_GRADIENTS = 4
"""Gradients of the embeddings that it holds at a time: taken and in a row, of a form and of plain
rows."""
SHARED = "the model's files, shared"
PRIVATE = "of each rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingMemory:
    """Bytes while a model is loaded.

    Attributes:
        host: of one machine: `SHARED` once for all ranks, pages that the kernel may drop and read
            again, and `PRIVATE` for each of them.
        device: of one rank at each moment, without what samples; in order.
    """

    host: Mapping[str, int]
    device: Mapping[str, int]

    @property
    def largest_moment(self) -> str:
        """The moment that needs most of the device."""
        return max(self.device, key=lambda moment: self.device[moment])

    @property
    def peak(self) -> int:
        """Bytes of the device at the largest moment."""
        return self.device[self.largest_moment]


def estimate_loading(
    runner: RunnerSpec, shape: ModelShape, learned: int, *, stored_width: int = 2
) -> LoadingMemory:
    """Counts the memory of loading a pretrained model into a learner.

    Args:
        runner: ZeRO stage, precision, ranks.
        shape: the model.
        learned: number of parameters that are trained.
        stored_width: bytes of a weight in the model's files.
    """
    width = 2 if runner.dtype == "bfloat16" else 4
    adam = 0 if runner.offload_optimizer else learned  # parameters whose float32 copy is made here
    whole, part = width * shape.parameters, width * -(-shape.parameters // runner.ranks)
    device = {"trial of forms": _estimate_trial_bytes(runner, shape)}
    if runner.zero_stage == 3:
        device["weights, one by one"] = part + width * shape.largest
        device["optimizer"] = part + 8 * adam // runner.ranks + width * BUCKET
    else:
        device["weights, one by one"] = whole
        device["weights in a row"] = whole + width * learned * (runner.zero_stage > 0)
        device["optimizer"] = (
            whole
            + {
                0: 4 * learned,
                1: 4 * adam // runner.ranks + 4 * learned,
                2: 4 * (adam + learned) // runner.ranks,
            }[runner.zero_stage]
        )
    return LoadingMemory(
        host={
            SHARED: stored_width * shape.parameters,
            PRIVATE: 0 if stored_width == width else whole,
        },
        device=device,
    )


def _estimate_trial_bytes(runner: RunnerSpec, shape: ModelShape) -> int:
    """Bytes of the first layers in float32, their gradients and activations."""
    few = replace(shape, layers=min(TRIAL_LAYERS, shape.layers))
    plain = RunnerSpec(micro_batch_tokens=runner.micro_batch_tokens, zero_stage=3)
    computed = estimate_update_bytes(plain, few, TRIAL_TOKENS, TRIAL_TARGETS)
    gradients = EMBEDDING_GRADIENTS * 4 * shape.vocabulary * shape.hidden
    return 4 * few.parameters + gradients + sum(computed.values())


def estimate_memory(trial: "PlanTrial", shape: ModelShape, tokens: TokenBudget) -> MemoryEstimate:
    """Estimates the peak memory of one rank, of loading too if that needs more than any stage of a
    step; see `estimate_step_memory`."""
    step = estimate_step_memory(trial, shape, tokens)
    copy, loading = "the sampler's copy", "the model while it is loaded"
    peak = estimate_loading(trial.recipe.spec.runner, shape, step.learned).peak
    if step.parts[copy] + peak <= step.total:
        return step
    return replace(
        step,
        parts={**step.parts, loading: peak},
        stages={"loading": (copy, loading), **step.stages},
    )
