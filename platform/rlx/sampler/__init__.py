"""Sampling engines. Each owns whole weights of its own and never calls a sharded module."""

from rlx.sampler.engines import (
    SamplingEngine,
    TransformersSampler,
    VllmSampler,
    copy_policy,
    open_sampler,
    require_engine,
)

__all__ = [
    "SamplingEngine",
    "TransformersSampler",
    "VllmSampler",
    "copy_policy",
    "open_sampler",
    "require_engine",
]
