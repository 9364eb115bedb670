"""The loss, as choices that do not know of each other: surrogate, aggregation, entropy bonus.

Aggregation is a weight per token, computed once for the whole optimiser step: the loss is
Σ weight · token loss over every micro-batch and rank. So the gradient is the same however the
batch is cut, and denominators are global by construction.
"""

from typing import Literal

import torch
from torch import Tensor

__all__ = ["ETA", "aggregation_weights", "clipped_surrogate", "entropy_weights"]

ETA = 1e-8
"""η of design 004: added to the number of tokens, so that an all-masked batch has loss 0."""


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip: tuple[float, float],
    dual_clip: float | None,
) -> Tensor:
    """Token losses of PPO with separate clips, and a bound where the advantage is negative.

        rₜ = exp(logprobₜ - oldₜ)
        ℓₜ = -min(rₜ Aₜ, clip(rₜ, 1 - low, 1 + high) Aₜ)
        Aₜ < 0:  ℓₜ = min(ℓₜ, -c Aₜ)

    Args:
        logprobs: `[...]` nats under the policy being trained, at the sampler's temperature.
        old_logprobs: `[...]` nats under the policy that counts as old.
        advantages: `[...]`.
        clip: (low, high).
        dual_clip: c > 1, or None for no bound.

    Returns:
        `[...]` losses, not yet aggregated.

    Reference:
        PPO, arXiv 1707.06347, equation 7; dual clip, arXiv 1912.09729; clip-higher, arXiv
        2503.14476.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    low, high = clip
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def aggregation_weights(
    mask: Tensor,
    kinds: Tensor,
    *,
    aggregate: Literal["token_mean", "sequence_mean"],
    per_turn: bool,
) -> Tensor:
    """`[B, T]` weights that turn token losses into the step's loss.

        token_mean:     wᵢₜ = mᵢₜ / (Σ m + η)
        sequence_mean:  wᵢₜ = mᵢₜ / (Σₜ mᵢₜ · rows with tokens)
        per_turn:       the sums and counts run over rows of the same kind, and kinds are added

    Args:
        mask: `[B, T]` bool tokens that learn, of the whole optimiser step.
        kinds: `[B]` int64 rows with equal numbers are the same kind of turn.
        aggregate: whether tokens or rows count alike.
        per_turn: average within each kind.
    """
    weight = mask.to(torch.float32)
    lengths = weight.sum(dim=1)
    group = kinds if per_turn else torch.zeros_like(kinds)
    _, slot = group.unique(return_inverse=True)
    zeros = weight.new_zeros(int(slot.max()) + 1)
    if aggregate == "token_mean":
        return weight / (zeros.index_add(0, slot, lengths)[slot] + ETA)[:, None]
    rows = zeros.index_add(0, slot, (lengths > 0).to(torch.float32))[slot]
    return weight / (lengths * rows).clamp(min=1)[:, None]


def entropy_weights(contents: Tensor, coefficient: float) -> Tensor:
    """`[B, T]` weights of the bonus: `coefficient` times the mean over a span's content tokens."""
    weight = contents.to(torch.float32)
    return coefficient * weight / (weight.sum() + ETA)
