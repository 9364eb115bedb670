"""KL from a reference policy, estimated per token from the log-probabilities of sampled tokens, and
the coefficient that weighs it in the reward.

With x = log π(a) - log π_ref(a) and a sampled from π:

    estimator          value              E = KL(π‖π_ref)    gradient in expectation, as a loss
    k1, kl             x                  yes                0
    abs                |x|                no                 ∇ ‖π - π_ref‖₁
    k2, mse            x² / 2             no                 ∇ KL(π‖π_ref)
    k3, low_var_kl     exp(-x) + x - 1    yes, if unclamped  ∇ KL(π_ref‖π)

So k1 and k3 measure and belong in the reward, and k2 is the one to descend on.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlx.spec import KlKind

__all__ = ["CLAMP", "AdaptiveKl", "FixedKl", "kl_terms", "mean_kl", "subtract_kl_penalty"]

CLAMP = 5.0
"""k3 bounds x to ±5 before it is exponentiated, so a term is at most e⁵ - 6 ≈ 142.4."""


def kl_terms(logprobs: Tensor, reference: Tensor, kind: KlKind) -> Tensor:
    """KL of each token, by the estimator of that name.

    Args:
        logprobs: `[...]` nats under the policy that is held to the reference.
        reference: `[...]` nats of the same tokens under the reference policy.
        kind: k1 (also kl), abs, k2 (also mse) or k3 (also low_var_kl). k3 clamps x to ±5 inside
            and not its value, as the source does; beyond the clamp its gradient is 0.

    Returns:
        `[...]` nats; k1 may be negative. NaN in, NaN out: select by the mask before summing.

    Raises:
        ValueError: `kind` is none of these.

    Reference:
        Schulman, "Approximating KL Divergence", 2020; design 000, section 1.2 step 4.
    """
    excess = logprobs - reference
    match kind:
        case "k1" | "kl":
            return excess
        case "abs":
            return excess.abs()
        case "k2" | "mse":
            return excess.square() / 2
        case "k3" | "low_var_kl":
            shortfall = (-excess).clamp(-CLAMP, CLAMP)
            # expm1, since near 0 the ones would swallow a term of the size of x².
            return torch.expm1(shortfall) - shortfall
        case _:
            raise ValueError(f"kind is {kind!r}, not k1, kl, abs, k2, mse, k3 or low_var_kl")


def subtract_kl_penalty(
    token_rewards: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    beta: float,
    kind: KlKind,
) -> Tensor:
    """Token rewards less the KL of their tokens.

        rₜ ← rₜ - β · KLₜ   in the mask, 0 outside it

    Args:
        token_rewards: `[B, T]` rewards as placed.
        old_logprobs: `[B, T]` nats under the policy that counts as old.
        reference_logprobs: `[B, T]` nats under the reference policy.
        mask: `[B, T]` bool; nothing outside it is read.
        beta: β, the controller's.
        kind: estimator of `kl_terms`.

    Returns:
        `[B, T]`.

    Reference:
        Ziegler et al., arXiv 1909.08593, equation 2; design 000, section 1.2 step 4.
    """
    penalised = token_rewards - beta * kl_terms(old_logprobs, reference_logprobs, kind)
    return torch.where(mask, penalised, token_rewards.new_zeros(()))


def mean_kl(terms: Tensor, mask: Tensor) -> Tensor:
    """`[]` mean over rows of a row's mean over its tokens: the KL that a controller is told.

    Args:
        terms: `[B, T]` of `kl_terms`.
        mask: `[B, T]` bool. A row without tokens is left out; without any row, NaN.
    """
    tokens = mask.sum(dim=1)
    sums = torch.where(mask, terms, terms.new_zeros(())).sum(dim=1)
    return (sums / tokens.clamp(min=1))[tokens > 0].mean()


@dataclass(frozen=True, kw_only=True)
class FixedKl:
    """A coefficient that stays.

    Attributes:
        beta: β.
    """

    beta: float

    def update(self, current_kl: float, steps: int) -> "FixedKl":
        """Returns itself."""
        return self


@dataclass(frozen=True, kw_only=True)
class AdaptiveKl:
    """A coefficient that moves the measured KL towards a target.

        β ← β · (1 + clip(KL / target - 1, ±0.2) · steps / horizon)

    Attributes:
        beta: β, all of the state that changes.
        target: nats per token.
        horizon: in the unit of `steps`; how slowly β follows.

    Reference:
        Ziegler et al., arXiv 1909.08593, section 2.2.
    """

    beta: float
    target: float
    horizon: float

    def update(self, current_kl: float, steps: int) -> "AdaptiveKl":
        """The controller after `steps` samples in which `current_kl` was measured.

        Raises:
            ValueError: `current_kl` is NaN.
        """
        if math.isnan(current_kl):
            raise ValueError("current_kl is NaN: no token was measured, or a logprob is broken")
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        return replace(self, beta=self.beta * (1 + error * steps / self.horizon))
