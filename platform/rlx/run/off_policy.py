"""Figures of how far a step's rollouts are from the policy that learns from them."""

from typing import TYPE_CHECKING

from rlx.loss.correction import mismatch
from rlx.spec import LossSpec
from rlx.step import TrainBatch

if TYPE_CHECKING:
    from rlx.learner import UpdateStats  # brings DeepSpeed

__all__ = ["off_policy_figures"]


def off_policy_figures(
    train: TrainBatch, loss: LossSpec, first: "UpdateStats | None", staleness: int
) -> dict[str, float]:
    """What the sampler's log-probabilities are to the learner's before the update.

    Where the learner computed its own in advance, they are compared on every token that learns;
    else on those that the first optimiser step computes, at no cost.

    Args:
        train: what was trained on.
        loss: of the phase.
        first: of the step's optimiser steps; None where none was taken.
        staleness: training steps between the weights that sampled and those that learn.
    """
    figures = {"sampler/staleness": float(staleness)}
    if loss.old_logprobs == "learner":
        old, behaviour = train.streams.old_logprobs, train.batch.behaviour_logprobs
        found = mismatch(old, behaviour, train.sampled)
        if found is not None:
            figures["sampler/mismatch_k3"] = found.k3
            figures["sampler/mismatch_ratio_max"] = found.ratio_max
            figures["sampler/mismatch_row_ratio_max"] = found.row_ratio_max
    elif first is not None:
        figures["sampler/mismatch_k3"] = first.kl
        figures["sampler/mismatch_ratio_max"] = first.token_ratio_max
    if train.correction is not None:
        figures["sampler/correction_mean"] = train.correction.mean
        figures["sampler/correction_share"] = train.correction.share
    return figures
