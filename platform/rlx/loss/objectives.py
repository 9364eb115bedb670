"""Surrogate losses, the value loss, and the aggregation weights."""

import torch
from torch import Tensor

from rlx.spec import Aggregate

__all__ = [
    "ETA",
    "aggregate_losses",
    "aggregation_weights",
    "clipped_surrogate",
    "compute_cispo_loss",
    "compute_unclipped_loss",
    "entropy_weights",
    "sequence_log_ratio",
    "value_loss",
]

LONGEST = 20.0
"""Log-ratios are clamped to ±20 nats before exponentiation: beyond that, a clipped token's gradient
would be 0 · ∞.
"""

ETA = 1e-8
"""η, added to the number of tokens, so that a fully masked batch has loss 0."""


# Ratio ------------------------------------------------------------------------------------------


def sequence_log_ratio(log_ratio: Tensor, rows: Tensor) -> Tensor:
    """Each token's log-ratio replaced by the mean over its row: one ratio per sequence.

        log sᵢ = 1/|yᵢ| Σₜ log rᵢₜ

    Args:
        log_ratio: `[M]` nats; all learning tokens of every row present.
        rows: `[M]` int64 row of each token.

    Returns:
        `[M]`.

    Reference:
        GSPO, arXiv 2507.18071, equation 7.
    """
    _, slot, counts = rows.unique(return_inverse=True, return_counts=True)
    sums = log_ratio.new_zeros(len(counts)).index_add(0, slot, log_ratio)
    means: Tensor = sums / counts
    return means[slot]


def _compute_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LONGEST, LONGEST).exp()


# Surrogate --------------------------------------------------------------------------------------


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip: tuple[float, float],
    dual_clip: float | None,
) -> Tensor:
    """PPO token losses with separate clip bounds, and a dual clip for negative advantages.

        ℓₜ = -min(rₜ Aₜ, clip(rₜ, 1 - low, 1 + high) Aₜ)
        Aₜ < 0:  ℓₜ = min(ℓₜ, -c Aₜ)

    Args:
        log_ratio: `[...]` nats, log rₜ.
        advantages: `[...]`.
        clip: (low, high).
        dual_clip: c > 1, or None for no bound.

    Returns:
        `[...]` losses, not yet aggregated.

    Reference:
        PPO, arXiv 1707.06347, equation 7; dual clip, arXiv 1912.09729; clip-higher, arXiv
        2503.14476.
    """
    ratio = _compute_ratio(log_ratio)
    low, high = clip
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def compute_cispo_loss(
    log_ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, clip: tuple[float, float]
) -> Tensor:
    """Token losses with the clipped ratio as a weight, so that every token keeps its gradient.

        ℓₜ = -sg(clip(rₜ, 1 - low, 1 + high)) Aₜ log πₜ

    Args:
        log_ratio: `[...]` nats, log rₜ.
        advantages: `[...]`.
        logprobs: `[...]` nats under the policy being trained.
        clip: (low, high).

    Reference:
        CISPO, arXiv 2506.13585, equation 4.
    """
    low, high = clip
    weight = _compute_ratio(log_ratio.detach()).clamp(1 - low, 1 + high)
    return -weight * advantages * logprobs


def compute_unclipped_loss(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Token losses of the importance-weighted policy gradient, `[...]`.

    ℓₜ = -rₜ Aₜ
    """
    return -_compute_ratio(log_ratio) * advantages


# Critic -----------------------------------------------------------------------------------------


def value_loss(
    values: Tensor, old_values: Tensor | None, returns: Tensor, *, clip: float | None
) -> Tensor:
    """Token losses of a critic, optionally clipped around its old values.

        ℓₜ = ½ max((Vₜ - Rₜ)², (clip(Vₜ, V_old - c, V_old + c) - Rₜ)²)

    Args:
        values: `[...]` Vₜ.
        old_values: `[...]` values from which the returns were computed; read only with a clip.
        returns: `[...]` Rₜ.
        clip: c, or None for the plain square.

    Returns:
        `[...]` losses, not yet averaged.

    Raises:
        ValueError: a clip is set without old values.

    Reference:
        Schulman et al., PPO, arXiv 1707.06347, as its authors implemented it (`ppo2`).
    """
    loss = (values - returns).square()
    if clip is not None:
        if old_values is None:
            raise ValueError("a value clip needs old_values")
        near = torch.clamp(values, old_values - clip, old_values + clip)
        loss = torch.maximum(loss, (near - returns).square())
    return loss / 2


# Aggregation ------------------------------------------------------------------------------------


def aggregation_weights(
    mask: Tensor,
    kinds: Tensor,
    *,
    aggregate: Aggregate,
    per_turn: bool,
    constant_lengths: Tensor | None = None,
) -> Tensor:
    """`[B, T]` weights that turn token losses into the step's loss.

        token_mean:     wᵢₜ = mᵢₜ / (Σ m + η)                        BNPO, DAPO, RLCR in two turns
        sequence_mean:  wᵢₜ = mᵢₜ / (Σₜ mᵢₜ · rows)                   GRPO
        sequence_sum:   wᵢₜ = mᵢₜ / rows
        constant:       wᵢₜ = mᵢₜ / (L · rows)                       Dr. GRPO
        per_turn:       sums and counts run over rows of one kind, and the kinds are added

    Only rows with a learning token count.

    Args:
        mask: `[B, T]` bool tokens that learn, of the whole optimiser step.
        kinds: `[B]` int64 rows with equal numbers are the same kind of turn.
        aggregate: one of the rules above.
        per_turn: average within each kind.
        constant_lengths: `[B]` L of each row; for "constant" only.

    Reference:
        DeepSeekMath, arXiv 2402.03300, equation 3; Dr. GRPO, arXiv 2503.20783, section 3.2; DAPO,
        arXiv 2503.14476, section 3.3.
    """
    weight = mask.to(torch.float32)
    lengths = weight.sum(dim=1)
    group = kinds if per_turn else torch.zeros_like(kinds)
    _, slot = group.unique(return_inverse=True)
    zeros = weight.new_zeros(int(slot.max()) + 1)
    if aggregate == "token_mean":
        return weight / (zeros.index_add(0, slot, lengths)[slot] + ETA)[:, None]
    rows = zeros.index_add(0, slot, (lengths > 0).to(torch.float32))[slot]
    if aggregate == "sequence_mean":
        rows = rows * lengths
    elif aggregate == "constant":
        if constant_lengths is None:
            raise ValueError("aggregate 'constant' needs constant_lengths")
        rows = rows * constant_lengths
    return weight / rows.clamp(min=1)[:, None]


def aggregate_losses(
    losses: Tensor,
    mask: Tensor,
    kinds: Tensor,
    *,
    aggregate: Aggregate,
    per_turn: bool = False,
    constant_lengths: Tensor | None = None,
) -> Tensor:
    """`[]` the loss of a step whose tokens are all at hand: Σ w ℓ with `aggregation_weights`.

    A training step adds up the same terms over micro-batches and ranks.

    Args:
        losses: `[B, T]` token losses, read only in the mask.
        mask, kinds, aggregate, per_turn, constant_lengths: as in `aggregation_weights`.
    """
    weights = aggregation_weights(
        mask, kinds, aggregate=aggregate, per_turn=per_turn, constant_lengths=constant_lengths
    )
    return (weights * torch.where(mask, losses, 0.0)).sum()


def entropy_weights(contents: Tensor, coefficient: float) -> Tensor:
    """`[B, T]` weights of the entropy bonus: `coefficient` times the mean over content tokens."""
    weight = contents.to(torch.float32)
    return coefficient * weight / (weight.sum() + ETA)
