from .drift import SamplerDrift
from .engines import (
    AdaptableEngine,
    SamplingEngine,
    copy_policy,
    count_servers,
    load_weights,
    name_weights,
    open_sampler,
    open_transformers,
    open_vllm,
    release_memory,
    require_engine,
    takes_adapter,
    tell_ages,
)
from .limits import expect_dialogue_length
from .transformers_engine import TransformersSampler
from .vllm_engine import VllmSampler
from .vllm_pool import PoolSampler

__all__ = [
    "AdaptableEngine",
    "PoolSampler",
    "SamplerDrift",
    "SamplingEngine",
    "TransformersSampler",
    "VllmSampler",
    "copy_policy",
    "count_servers",
    "expect_dialogue_length",
    "load_weights",
    "name_weights",
    "open_sampler",
    "open_transformers",
    "open_vllm",
    "release_memory",
    "require_engine",
    "takes_adapter",
    "tell_ages",
]
