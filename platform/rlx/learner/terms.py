"""A micro-batch's part of the policy's loss, and the figures of an optimiser step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.kl import kl_terms
from rlx.learner.pack import PackedBatch
from rlx.loss import (
    clipped_surrogate,
    compute_cispo_loss,
    compute_unclipped_loss,
    sequence_log_ratio,
)
from rlx.spec import LossSpec
from rlx.step import TrainBatch

__all__ = ["UpdateStats", "UpdateSums", "UpdateTargets", "policy_term"]

LARGEST = ("ratio_max", "token_ratio_max")
"""Figures of `Sums` that are maxima."""


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What one optimiser step did, over all ranks.

    Attributes:
        loss: Σ weight · (surrogate + penalty), minus the entropy bonus.
        entropy: mean over the computed tokens, nats.
        bonus_entropy: mean over the tokens of the entropy bonus, nats; None without one.
        kl: mean of k3 = r - 1 - log r between the policy that counts as old and the learning one,
            nats.
        kl_loss: mean KL from the reference policy, weighted as the loss is, by the penalty's
            estimator and before its coefficient, nats; None without a penalty.
        clip_fraction: share of computed tokens whose ratio, or whose row's, the surrogate holds at
            a bound, dual clip included.
        ratio_max: largest importance ratio in the loss, of a token or of a row.
        token_ratio_max: of a token, whatever the loss's is.
        grad_norm: before clipping.
        learning_rate: as used.
        computed_tokens: packed tokens, padding left out.
        row_tokens: tokens of the rows they stand for.
    """

    loss: float
    entropy: float
    bonus_entropy: float | None
    kl: float
    kl_loss: float | None
    clip_fraction: float
    ratio_max: float
    token_ratio_max: float
    grad_norm: float
    learning_rate: float
    computed_tokens: int
    row_tokens: int


@dataclass(frozen=True, eq=False, slots=True)
class UpdateTargets:
    """What the step's batch says about the `[M]` targets of a micro-batch.

    Attributes:
        rows: of the step's batch. With sequence ratios all learning tokens of a row that has an
            advantage are here: they are wanted, and micro-batches do not cut rows.
        old: log-probabilities, nats, the ratio's denominator.
        advantages, weights: of the token loss.
        bonus: weights of the entropy bonus.
        reference: log-probabilities, nats; None without a penalty.
    """

    rows: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    bonus: Tensor
    reference: Tensor | None

    @classmethod
    def from_packed(cls, packed: PackedBatch, train: TrainBatch, spec: LossSpec) -> "UpdateTargets":
        """Looks up the targets of a micro-batch.

        Raises:
            ValueError: the spec has a penalty and the batch no reference.
        """
        reference = None
        if spec.kl is not None:
            if train.streams.reference_logprobs is None:
                raise ValueError("loss.kl needs streams.reference_logprobs")
            reference = packed.gather_targets(train.streams.reference_logprobs)
        return cls(
            rows=packed.rows,
            old=packed.gather_targets(train.streams.old_logprobs),
            advantages=packed.gather_targets(train.advantages),
            weights=packed.gather_targets(train.weights),
            bonus=packed.gather_targets(train.entropy_weights),
            reference=reference,
        )


class UpdateSums:
    """Running sums of one step's figures, added over micro-batches and ranks."""

    def __init__(self) -> None:
        self.loss = self.entropy = self.bonus_entropy = self.kl = self.clipped = 0.0
        self.kl_loss = self.kl_weight = self.ratio_max = self.token_ratio_max = 0.0
        self.tokens = self.bonus_tokens = 0

    @staticmethod
    def sum_over_ranks(parts: "list[UpdateSums]") -> "UpdateSums":
        """Sums over ranks."""
        total = UpdateSums()
        for name in vars(total):
            values = [getattr(part, name) for part in parts]
            setattr(total, name, max(values) if name in LARGEST else sum(values))
        return total

    def stats(
        self, *, grad_norm: float, learning_rate: float, computed_tokens: int, row_tokens: int
    ) -> UpdateStats:
        """Sums to means."""
        count = max(self.tokens, 1)
        return UpdateStats(
            loss=self.loss,
            entropy=self.entropy / count,
            bonus_entropy=self.bonus_entropy / self.bonus_tokens if self.bonus_tokens else None,
            kl=self.kl / count,
            kl_loss=self.kl_loss / self.kl_weight if self.kl_weight else None,
            clip_fraction=self.clipped / count,
            ratio_max=self.ratio_max,
            token_ratio_max=self.token_ratio_max,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            computed_tokens=computed_tokens,
            row_tokens=row_tokens,
        )


def policy_term(
    logprobs: Tensor, entropy: Tensor, targets: UpdateTargets, spec: LossSpec, sums: UpdateSums
) -> Tensor:
    """Σ weight · (surrogate + penalty) - Σ bonus · entropy over a micro-batch's targets.

    Args:
        logprobs: `[M]` nats under the policy being trained.
        entropy: `[M]` nats of the distributions they come from.
        targets: what else there is to know about them.
        spec: ratio, surrogate and penalty.
        sums: where figures are added.

    Returns:
        `[]`. A filler has no targets; its sum over nothing still carries a gradient of zeros, so
        that every rank runs every backward.
    """
    log_ratio = token_log_ratio = logprobs - targets.old
    if spec.ratio == "sequence":
        log_ratio = sequence_log_ratio(token_log_ratio, targets.rows)
    losses = _compute_surrogate_loss(log_ratio, logprobs, targets.advantages, spec)
    if spec.kl is not None and targets.reference is not None:
        penalty = kl_terms(logprobs, targets.reference, spec.kl.kl_penalty)
        losses = losses + spec.kl.coefficient * penalty
        sums.kl_loss += float((targets.weights * penalty.detach()).sum())
        sums.kl_weight += float(targets.weights.sum())
    term: Tensor = (targets.weights * losses).sum() - (targets.bonus * entropy).sum()
    sums.loss += float(term.detach())
    if len(logprobs):
        with torch.no_grad():
            _accumulate_statistics(token_log_ratio, log_ratio, entropy, targets, spec, sums)
    return term


def _compute_surrogate_loss(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, spec: LossSpec
) -> Tensor:
    """`[M]` token losses."""
    match spec.surrogate:
        case "clip":
            return clipped_surrogate(
                log_ratio, advantages, clip=spec.clip, dual_clip=spec.dual_clip
            )
        case "cispo":
            return compute_cispo_loss(log_ratio, advantages, logprobs, clip=spec.clip)
        case "none":
            return compute_unclipped_loss(log_ratio, advantages)


def _find_clipped_tokens(ratio: Tensor, advantages: Tensor, spec: LossSpec) -> Tensor:
    """`[M]` bool: where the surrogate holds the ratio at a bound."""
    low, high = spec.clip
    above, below = ratio > 1 + high, ratio < 1 - low
    match spec.surrogate:
        case "clip":
            held = (above & (advantages > 0)) | (below & (advantages < 0))
            if spec.dual_clip is not None:
                held |= (ratio > spec.dual_clip) & (advantages < 0)
            return held
        case "cispo":
            return (above | below) & (advantages != 0)
        case "none":
            return torch.zeros_like(above)


def _accumulate_statistics(
    token_log_ratio: Tensor,
    log_ratio: Tensor,
    entropy: Tensor,
    targets: UpdateTargets,
    spec: LossSpec,
    sums: UpdateSums,
) -> None:
    """Adds the figures of one micro-batch of `[M]` tokens, at least one."""
    ratio, kept_open = log_ratio.exp(), targets.bonus != 0
    sums.kl += float((token_log_ratio.expm1() - token_log_ratio).sum())
    sums.clipped += float(_find_clipped_tokens(ratio, targets.advantages, spec).sum())
    sums.entropy += float(entropy.sum())
    sums.bonus_entropy += float(entropy[kept_open].sum())
    sums.tokens += len(ratio)
    sums.bonus_tokens += int(kept_open.sum())
    sums.ratio_max = max(sums.ratio_max, float(ratio.max()))
    sums.token_ratio_max = max(sums.token_ratio_max, float(token_log_ratio.exp().max()))
