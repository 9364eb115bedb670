"""Per-token estimates of the KL divergence from a reference policy, and its coefficient in the
reward.

With x = log π(a) - log π_ref(a) and a sampled from π:

    estimator          value              E = KL(π‖π_ref)    gradient in expectation, as a loss
    k1, kl             x                  yes                0
    abs                |x|                no                 ∇ ‖π - π_ref‖₁
    k2, mse            x² / 2             no                 ∇ KL(π‖π_ref)
    k3, low_var_kl     exp(-x) + x - 1    yes, if unclamped  ∇ KL(π_ref‖π)

Use k1 or k3 to measure KL and in the reward, and k2 as a loss.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlx.spec import KlKind

CLAMP = 5.0
"""k3 clamps x to ±5 before exponentiating, so a term is at most e⁵ - 6 ≈ 142.4."""


def kl_terms(logprobs: Tensor, reference: Tensor, kind: KlKind) -> Tensor:
    """KL estimate of each token, `[...]` nats, from log-probabilities of the same tokens.

    k3 clamps x to ±5, not its own value, as KG-R1 does; beyond the clamp its gradient is 0. NaN in,
    NaN out: apply the mask before summing.

    Raises:
        ValueError: `kind` is none of these.

    Reference:
        Schulman, "Approximating KL Divergence", 2020; KG-R1, arXiv 2509.26383.
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
            # expm1 keeps precision near 0, where the result is of the order of x².
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
    """`[B, T]` token rewards minus the KL penalty of their tokens.

        rₜ ← rₜ - β · KLₜ   in the mask, 0 outside it

    Reference:
        Ziegler et al., arXiv 1909.08593, equation 2; KG-R1, arXiv 2509.26383.
    """
    penalised = token_rewards - beta * kl_terms(old_logprobs, reference_logprobs, kind)
    return torch.where(mask, penalised, token_rewards.new_zeros(()))


def mean_kl(terms: Tensor, mask: Tensor) -> Tensor:
    """`[]` mean KL over rows of the mean over a row's tokens in the mask: the input of the
    controller. Rows without tokens are skipped; NaN if no row has any."""
    tokens = mask.sum(dim=1)
    sums = torch.where(mask, terms, terms.new_zeros(())).sum(dim=1)
    return (sums / tokens.clamp(min=1))[tokens > 0].mean()


def adapt_beta(
    beta: float, current_kl: float, *, target: float, horizon: float, steps: int
) -> float:
    """The KL coefficient after `steps` samples with a mean KL of `current_kl` nats per token.

        β ← β · (1 + clip(KL / target - 1, ±0.2) · steps / horizon)

    Raises:
        ValueError: `current_kl` is NaN.

    Reference:
        Ziegler et al., arXiv 1909.08593, section 2.2.
    """
    if math.isnan(current_kl):
        raise ValueError("current_kl is NaN: no token was measured, or a logprob is broken")
    error = min(max(current_kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * steps / horizon)


@dataclass(frozen=True, kw_only=True)
class KlCoefficient:
    """A KL coefficient, constant or moving the measured KL towards `target`, nats per token, by
    `adapt_beta`."""

    beta: float
    target: float | None = None
    horizon: float = math.inf

    def update(self, current_kl: float, steps: int) -> "KlCoefficient":
        """The coefficient after `steps` samples with a mean KL of `current_kl`.

        Raises:
            ValueError: β adapts, and `current_kl` is NaN.
        """
        if self.target is None:
            return self
        how = {"target": self.target, "horizon": self.horizon}
        return replace(self, beta=adapt_beta(self.beta, current_kl, **how, steps=steps))
