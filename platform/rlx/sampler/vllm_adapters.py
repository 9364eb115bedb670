"""What vLLM needs to know of the LoRA adapter that it takes; imported by its worker."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from safetensors.torch import save_file
from torch import Tensor, nn

__all__ = ["build_adapter_options", "require_adapters", "write_adapter"]

PEFT = "base_model.model."
"""Begins names of weights in peft's files."""


def build_adapter_options(adapter: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of vLLM for one adapter at a time.

    Raises:
        ValueError: vLLM's largest rank is smaller.
    """
    if adapter is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= adapter["rank"]]
    if not ranks:
        largest = max(get_args(MaxLoRARanks))
        raise ValueError(f"vLLM takes adapters up to rank {largest}, not {adapter['rank']}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(ranks)}


def require_adapters(model: nn.Module, layers: Sequence[str]) -> None:
    """Checks that vLLM adapts all of these layers, for it ignores an adapter of any other.

    Raises:
        ValueError: it does not.
    """
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager: Any = model.lora_manager
    renames = getattr(model, "hf_to_vllm_mapper", None)
    renames = renames and renames.get_rename_mapper()
    taken = {part for parts in manager.packed_modules.values() for part in parts}
    taken |= manager.modules.keys()
    missing = sorted(
        {
            name.rpartition(".")[2]
            for name in layers
            if parse_fine_tuned_lora_name(f"{PEFT}{name}.lora_A.weight", renames)[0] not in taken
        }
    )
    if missing:
        raise ValueError(f"vLLM has no adapters for the layers {', '.join(missing)}")


def write_adapter(
    adapter: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]], folder: Path
) -> None:
    """Writes an adapter as peft does, the only form in which vLLM reads one."""
    save_file(
        {name: weight.cpu().contiguous() for name, weight in weights},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": adapter["rank"], "lora_alpha": adapter["alpha"]}
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "target_modules": adapter["layers"]})
    )
