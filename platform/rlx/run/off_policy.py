"""Metrics of the mismatch between the policy that sampled a step's rollouts and the learner."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rlx.batch import TokenBatch
from rlx.loss import compute_sampler_mismatch
from rlx.rollout import RolloutTree
from rlx.spec import LossSpec
from rlx.train_batch import TrainBatch

if TYPE_CHECKING:
    from rlx.learner import UpdateStats  # brings DeepSpeed

__all__ = ["off_policy_figures", "staleness_figures"]


def staleness_figures(
    trees: Sequence[RolloutTree], step: int, sampled_after: int
) -> dict[str, float]:
    """Training steps between the weights that sampled and those that learn: the mean over the
    policy's tokens, and the largest where an engine has taken weights while it sampled.

    Args:
        trees: those that learn.
        step: the step that learns from them.
        sampled_after: the step whose weights sampled them, for engines that keep their weights.
    """
    turns = [tree.segments[s] for tree in trees for s in tree.policy_segments]
    runs = [
        run
        for turn in turns
        for run in turn.sampled_after or ((len(turn.token_ids), sampled_after),)
    ]
    if not runs:
        return {}
    ages = [(count, step - 1 - after) for count, after in runs]
    tokens = sum(count for count, _ in ages)
    figures = {"sampler/staleness": sum(count * age for count, age in ages) / tokens}
    if any(turn.sampled_after for turn in turns):
        figures["sampler/staleness_max"] = float(max(age for _, age in ages))
    return figures


def off_policy_figures(
    train: TrainBatch,
    loss: LossSpec,
    first: "UpdateStats | None",
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
        learned: computes the learner's log-probabilities of masked tokens, as `Learner.logprobs`.
    """
    figures: dict[str, float] = {}
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
