from .engines import SamplingEngine, copy_policy, open_sampler, require_engine
from .transformers_engine import TransformersSampler
from .vllm_engine import SamplerDrift, VllmSampler

__all__ = [
    "SamplerDrift",
    "SamplingEngine",
    "TransformersSampler",
    "VllmSampler",
    "copy_policy",
    "open_sampler",
    "require_engine",
]
