from .drift import SamplerDrift
from .engines import (
    SamplingEngine,
    copy_policy,
    open_sampler,
    open_transformers,
    open_vllm,
    require_engine,
)
from .transformers_engine import TransformersSampler
from .vllm_engine import VllmSampler

__all__ = [
    "SamplerDrift",
    "SamplingEngine",
    "TransformersSampler",
    "VllmSampler",
    "copy_policy",
    "open_sampler",
    "open_transformers",
    "open_vllm",
    "require_engine",
]
