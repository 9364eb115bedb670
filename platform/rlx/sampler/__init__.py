"""Sampling engines. Each owns whole weights of its own and never calls a sharded module."""

from rlx.sampler.transformers_engine import TransformersSampler

__all__ = ["TransformersSampler"]
