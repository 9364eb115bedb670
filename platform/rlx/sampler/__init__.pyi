from .draw import expect_dialogue_length
from .engine import (
    SamplerDrift,
    SamplingEngine,
    SequenceLogprobs,
    copy_policy,
    open_sampler,
    require_engine,
)
from .transformers_engine import TransformersSampler, open_transformers
from .vllm_engine import VllmSampler, open_vllm

__all__ = [
    "SamplerDrift",
    "SamplingEngine",
    "SequenceLogprobs",
    "TransformersSampler",
    "VllmSampler",
    "copy_policy",
    "expect_dialogue_length",
    "open_sampler",
    "open_transformers",
    "open_vllm",
    "require_engine",
]
