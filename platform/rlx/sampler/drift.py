"""How far a sampler is from the learner."""

from dataclasses import dataclass

__all__ = ["SamplerDrift"]


@dataclass(frozen=True, slots=True)
class SamplerDrift:
    """Differences between the sampler's and the learner's log-probabilities of the same tokens.

    In bfloat16, single tokens differ by several tenths of a nat although both sides are right, so a
    sampler is judged by the mean.

    Attributes:
        largest: max |Δ|, nats.
        mean: mean |Δ|, nats.
        k3: mean of r - 1 - log r with r = learner / sampler, an estimate of the KL, nats.
    """

    largest: float
    mean: float
    k3: float
