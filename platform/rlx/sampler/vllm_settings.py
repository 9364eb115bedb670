"""What a vLLM worker is told when it starts."""

import copy
from pathlib import Path
from typing import Any

import torch

from rlx.model import Policy, find_target_layers
from rlx.spec import RunnerSpec
from rlx.spec import VllmSamplerSpec as VllmSpec

__all__ = ["ModelFiles", "build_worker_settings"]


class ModelFiles:
    """The files of a model that vLLM starts from: configuration and tokenizer, but no weights.

    Args:
        policy: not kept.
    """

    def __init__(self, policy: Policy) -> None:
        self._config, self._tokenizer = copy.deepcopy(policy.model.config), policy.tokenizer
        self._config.architectures = [type(policy.model).__name__]

    def write(self, folder: Path) -> None:
        """Writes the files."""
        self._config.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


def build_worker_settings(
    policy: Policy, spec: VllmSpec, runner: RunnerSpec, device: torch.device
) -> dict[str, Any]:
    """The settings of a worker, without its folder.

    Args:
        device: device of the rank; a worker of a pool computes on others of the same kind.
    """
    options = {"max_rows", "kv_cache_mb", "max_length", "gpu_memory_utilization", "colocate"}
    apart = {} if spec.pool is None else _describe_pool(spec)
    return {
        **spec.model_dump(include=options),
        "tensor_parallel": 1,
        "repeatable": False,
        "socket": None,
        "adapter": _describe_adapter(policy) if spec.adapters == "swap" else None,
        "dtype": runner.dtype,
        "device": device.type,
        "end_ids": list(policy.end_ids),
        **apart,
    }


def _describe_pool(spec: VllmSpec) -> dict[str, Any]:
    """What differs for the servers of a pool, which never give their memory to a learner."""
    assert spec.pool is not None
    shared = spec.pool.model_dump(
        include={"tensor_parallel", "gpu_memory_utilization", "repeatable"}
    )
    return {**shared, "colocate": False}


def _describe_adapter(policy: Policy) -> dict[str, Any] | None:
    """The shape of the adapters that training adds to a policy."""
    if policy.lora is None:
        return None
    layers = find_target_layers(policy.model, policy.lora.targets)
    return {"rank": policy.lora.rank, "alpha": policy.lora.alpha, "layers": layers}
