"""Which GPUs a plan's memory fits. Nothing here imports torch."""

from collections.abc import Mapping
from types import MappingProxyType

from rlx.spec import RunnerSpec, SamplerSpec, VllmSamplerSpec
from rlx.trial.budget import MemoryEstimate

__all__ = ["USABLE_GIB", "compute_gpu_shares", "get_usable_share"]

USABLE_GIB: Mapping[str, int] = MappingProxyType(
    {"24 GB": 22, "48 GB": 44, "80 GB": 78, "141 GB": 139}
)
"""GiB that torch finds on a GPU, by the size in its name; an H200 has 141 GB."""
ROOM, ROOM_WITH_VLLM = 0.92, 0.95
"""What a plan may fill of them: fragments, the driver and NCCL need some too. vLLM keeps to its
share."""


def compute_gpu_shares(
    runner: RunnerSpec, sampler: SamplerSpec, memory: MemoryEstimate
) -> dict[str, float]:
    """The largest stage of a step as a share of what torch finds on a GPU, by the GPU's size; none
    on a CPU. vLLM on a rank's GPU takes the share that it is given."""
    if runner.device != "cuda":
        return {}
    shares = {}
    for size, gib in USABLE_GIB.items():
        usable, totals = gib << 30, memory.stage_totals
        if isinstance(sampler, VllmSamplerSpec) and _shares_gpu(sampler):
            given = int(sampler.gpu_memory_utilization * usable)
            totals["sampling"] += given - memory.parts["the sampler's copy"]
        shares[size] = max(totals.values()) / usable
    return shares


def get_usable_share(sampler: SamplerSpec) -> float:
    """The share of a GPU's memory that a plan may fill."""
    return ROOM_WITH_VLLM if _shares_gpu(sampler) else ROOM


def _shares_gpu(sampler: SamplerSpec) -> bool:
    return isinstance(sampler, VllmSamplerSpec)
