"""Tokens whose log-probability and advantage move together: they lower the entropy most."""

import torch
from torch import Tensor

from rlx.spec import ClipCovariance, KlCovariance

__all__ = [
    "compute_token_covariances",
    "draw_covariant_tokens",
    "find_largest_covariances",
    "select_covariant_tokens",
]


def compute_token_covariances(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """`[B, T]` each token's part of the covariance of advantage and log-probability; 0 outside.

        cₜ = (Aₜ - mean A) · (log πₜ - mean log π), means over the mask

    Args:
        advantages: `[B, T]`.
        logprobs: `[B, T]` nats.
        mask: `[B, T]` bool learning tokens of the whole step.

    Reference:
        Cui et al., "The Entropy Mechanism of Reinforcement Learning", arXiv 2505.22617.
    """
    covariances = torch.zeros_like(advantages)
    if mask.any():
        a, x = advantages[mask], logprobs[mask].to(advantages)
        covariances[mask] = (a - a.mean()) * (x - x.mean())
    return covariances


def find_largest_covariances(covariances: Tensor, mask: Tensor, *, fraction: float) -> Tensor:
    """`[B, T]` bool tokens with the largest positive covariances, at least one: KL-Cov.

    Args:
        covariances: `[B, T]`.
        mask: `[B, T]` bool.
        fraction: share of the tokens in the mask.

    Reference:
        KL-Cov, arXiv 2505.22617.
    """
    chosen, inside = torch.zeros_like(mask), covariances[mask]
    count = min(_count_tokens(mask, fraction), len(inside))
    largest = torch.zeros_like(inside, dtype=torch.bool)
    largest[inside.topk(count).indices] = True
    return chosen.masked_scatter(mask, largest & (inside > 0))


def draw_covariant_tokens(
    covariances: Tensor, mask: Tensor, *, fraction: float, low: float, high: float, seed: int
) -> Tensor:
    """`[B, T]` bool tokens drawn at random from those with low < c < high: Clip-Cov.

    Args:
        covariances: `[B, T]`.
        mask: `[B, T]` bool.
        fraction: how many to draw at most, as a share of the tokens in the mask; at least one.
        low, high: bounds.
        seed: of the draw.

    Reference:
        Clip-Cov, arXiv 2505.22617.
    """
    candidates = (mask & (covariances > low) & (covariances < high)).nonzero()
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    drawn = candidates[order[: _count_tokens(mask, fraction)]]
    chosen = torch.zeros_like(mask)
    chosen[drawn[:, 0], drawn[:, 1]] = True
    return chosen


def select_covariant_tokens(
    advantages: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    spec: ClipCovariance | KlCovariance,
    seed: int,
) -> Tensor:
    """`[B, T]` bool tokens to which `loss.covariance` applies; see the functions above.

    The log-probabilities are those of the old policy, so that the choice is made once for the whole
    step, whatever its micro-batches and mini-batches.
    """
    covariances = compute_token_covariances(advantages, logprobs, mask)
    if isinstance(spec, KlCovariance):
        return find_largest_covariances(covariances, mask, fraction=spec.fraction)
    bounds = {"low": spec.low, "high": spec.high}
    return draw_covariant_tokens(covariances, mask, fraction=spec.fraction, seed=seed, **bounds)


def _count_tokens(mask: Tensor, fraction: float) -> int:
    return max(int(fraction * int(mask.sum())), 1)
