"""The value loss, and the aggregation weights."""

import torch
from torch import Tensor

from rlx.spec import Aggregate

__all__ = [
    "ETA",
    "aggregate_losses",
    "aggregation_weights",
    "entropy_weights",
    "value_loss",
]

ETA = 1e-8
"""η, added to the number of tokens, so that a fully masked batch has loss 0."""


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
