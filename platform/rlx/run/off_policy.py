"""Metrics of the mismatch between the policy that sampled a step's rollouts and the learner."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from rlx.batch import TokenBatch
from rlx.loss import compute_sampler_mismatch
from rlx.spec import LossSpec
from rlx.train_batch import TrainBatch

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
    """Compares the sampler's log-probabilities with the learner's before the update.

    If the learner computed old log-probabilities, they are compared on every trained token.
    Otherwise the statistics of the first optimiser step are used, at no extra cost. If there was
    no optimiser step, the weights are unchanged and the learner's log-probabilities are computed
    now.

    Args:
        train: the training batch, the same on every rank.
        loss: loss settings of the phase.
        first: statistics of the step's first optimiser step; None if there was none.
        staleness: training steps between the weights that sampled and those that learn.
        learned: computes the learner's log-probabilities of masked tokens, as `Learner.logprobs`.
    """
    figures = {"sampler/staleness": float(staleness)}
    if loss.old_logprobs == "behaviour" and first is not None:
        figures["sampler/mismatch_k3"] = first.kl
        figures["sampler/mismatch_ratio_max"] = first.token_ratio_max
    elif train.sampled_mask.any():
        recompute = loss.old_logprobs == "behaviour"
        ours = learned(train.batch, train.sampled_mask) if recompute else train.streams.old_logprobs
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
