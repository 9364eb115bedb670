"""Figures of how far a step's rollouts are from the policy that learns from them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from rlx.batch import TokenBatch
from rlx.loss import compute_sampler_mismatch
from rlx.spec import LossSpec
from rlx.step import TrainBatch

if TYPE_CHECKING:
    from rlx.learner import UpdateStats  # brings DeepSpeed

__all__ = ["off_policy_figures"]


def off_policy_figures(
    train: TrainBatch,
    loss: LossSpec,
    first: "UpdateStats | None",
    staleness: int,
    learned: Callable[[TokenBatch, Tensor], Tensor],
) -> dict[str, float]:
    """What the sampler's log-probabilities are to the learner's before the update.

    Where the learner computed its own in advance, they are compared on every token that learns;
    else on those that the first optimiser step computes, at no cost. Where there was none, no
    weight has changed, and the learner is asked now.

    Args:
        train: what was trained on, alike on every rank.
        loss: of the phase.
        first: of the step's optimiser steps; None where none was taken.
        staleness: training steps between the weights that sampled and those that learn.
        learned: the learner's log-probabilities of chosen tokens, as `Learner.logprobs`.
    """
    figures = {"sampler/staleness": float(staleness)}
    if loss.old_logprobs == "behaviour" and first is not None:
        figures["sampler/mismatch_k3"] = first.kl
        figures["sampler/mismatch_ratio_max"] = first.token_ratio_max
    elif train.sampled_mask.any():
        asked = loss.old_logprobs == "behaviour"
        ours = learned(train.batch, train.sampled_mask) if asked else train.streams.old_logprobs
        if found := compute_sampler_mismatch(
            ours, train.batch.behaviour_logprobs, train.sampled_mask
        ):
            figures["sampler/mismatch_k3"] = found.k3
            figures["sampler/mismatch_ratio_max"] = found.ratio_max
            figures["sampler/mismatch_row_ratio_max"] = found.row_ratio_max
    if train.correction is not None:
        figures["sampler/correction_mean"] = train.correction.mean
        figures["sampler/correction_share"] = train.correction.share
    return figures
