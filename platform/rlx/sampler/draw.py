"""Samples tokens from logits: temperature, top-k, top-p, and seeded uniform noise."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlx.errors import DivergedModelError
from rlx.spec import TurnSpec

__all__ = [
    "compute_sampling_logprobs",
    "require_finite_logits",
    "sample_tokens",
    "sample_uniforms",
]


def compute_sampling_logprobs(logits: Tensor, sampling: TurnSpec) -> Tensor:
    """Returns the log-probabilities of the distribution that is sampled from.

    Applies the temperature, then top-k, then top-p (the smallest set of tokens whose probability
    reaches `top_p`), and renormalizes.

    Args:
        logits: `[R, V]`.
        sampling: the turn's settings.

    Returns:
        `[R, V]` float32 nats; -inf for tokens that cannot be sampled.
    """
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_k:
        least = logprobs.topk(min(sampling.top_k, logprobs.shape[-1])).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logprobs.sort(dim=-1, descending=True)
        mass = ordered.softmax(dim=-1)
        outside = mass.cumsum(dim=-1) - mass >= sampling.top_p
        logprobs = logprobs.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    if sampling.top_k or sampling.top_p < 1:
        logprobs = logprobs.log_softmax(dim=-1)
    return logprobs


def sample_uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """Returns `[R, length]` float64 in [0, 1); row r depends only on seed r."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(length) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def sample_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Samples one token per row by inverting the cumulative distribution function.

    Args:
        logprobs: `[R, V]` from `compute_sampling_logprobs`.
        uniform: `[R]` in [0, 1).

    Returns:
        `[R]` int64 tokens, each with probability above 0; the last token for a row of NaN, which
        `require_finite_logits` reports without a device synchronization per token.
    """
    mass = logprobs.double().exp().cumsum(dim=-1)
    threshold = uniform.to(mass.device)[:, None] * mass[:, -1:]
    token = torch.searchsorted(mass, threshold, right=True).squeeze(-1)
    return token.clamp_(max=mass.shape[-1] - 1)


def require_finite_logits(logprobs: Iterable[Sequence[float]]) -> None:
    """Checks the log-probabilities of sampled tokens, which are NaN if the logits were.

    Raises:
        DivergedModelError: the logits were NaN, or infinite.
    """
    if any(math.isnan(value) for row in logprobs for value in row):
        raise DivergedModelError(
            "the model's logits are NaN: its weights have diverged, usually because "
            "optimizer.learning_rate or optimizer.max_grad_norm is too high, or a reward is extreme"
        )
