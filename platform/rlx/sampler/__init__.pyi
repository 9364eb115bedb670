from .engines import SamplingEngine, copy_policy, open_sampler, require_engine
from .transformers_engine import TransformersSampler
from .vllm_engine import VllmSampler

__all__ = [
    "SamplingEngine",
    "TransformersSampler",
    "VllmSampler",
    "copy_policy",
    "open_sampler",
    "require_engine",
]
