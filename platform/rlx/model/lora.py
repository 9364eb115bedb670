"""Low-rank adapters (Hu et al. 2021), through the peft library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlx.errors import EnvironmentFault, SpecError
from rlx.model.build import Policy
from rlx.model.files import share_weights
from rlx.seeding import derive_seed
from rlx.spec import Lora, ModelSpec, PretrainedModelSpec
from rlx.spec.reading import did_you_mean
from rlx.text import escape_unprintable

if TYPE_CHECKING:
    from peft.tuners.lora import Linear


NAME = "default"
"""Name of the adapter; peft's default."""
ALL = "all-linear"
LINEAR = (nn.Linear, Conv1D)
"""GPT-2 and similar models implement linear layers as `Conv1D`."""

Whole = Callable[[nn.Parameter], Tensor]
"""Returns a parameter's full value without gradient, gathered if it is sharded over ranks."""


def adapt_policy(policy: Policy, spec: ModelSpec, seed: int) -> Policy:
    """Returns the same policy; its model is adapted in place if the spec asks for LoRA."""
    if isinstance(spec, PretrainedModelSpec) and spec.lora is not None:
        adapt_model(policy.model, spec.lora, seed)
    return policy


def adapt_model(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Adds adapters to the linear layers that `lora` names, and freezes all other weights.

    B is zero at first, so the model's outputs do not change; A is drawn from the seed.

    Raises:
        EnvironmentFault: peft is not installed.
        SpecError: a target names no linear layer of this model.
    """
    if find_spec("peft") is None:
        raise EnvironmentFault("model.lora needs the package peft: pip install 'rlx[lora]'")
    import peft

    chosen = find_target_layers(model, lora.targets)
    config = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # annotated as int, but only divided
        lora_dropout=0.0,
        target_modules=chosen,
        # Conv1D stores its weight transposed.
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in chosen),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        peft.inject_adapter_in_model(config, model, adapter_name=NAME)


def find_target_layers(model: PreTrainedModel, targets: tuple[str, ...]) -> list[str]:
    """Returns the full names of the layers that match `targets` by full name or dotted suffix;
    raises as `adapt_model`."""
    linear = [name for name, module in model.named_modules() if isinstance(module, LINEAR)]
    head = next((n for n in linear if model.get_submodule(n) is model.get_output_embeddings()), "")
    if model.config.get_text_config().tie_word_embeddings:
        # An adapter on a tied output embedding would also change the input embedding.
        linear = [name for name in linear if name != head]
    chosen: set[str] = set()
    for target in targets:
        if target == ALL:
            chosen.update(name for name in linear if name != head)
            continue
        named = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not named:
            names = sorted({name.rpartition(".")[2] for name in linear})
            near = did_you_mean(target, [*names, ALL])
            guess = f" (did you mean {near!r}?)" if near else ""
            raise SpecError(
                "model.lora.targets: this model has no linear layer named "
                f"'{escape_unprintable(target)}' that can take an adapter{guess}; available: "
                f"{', '.join(map(escape_unprintable, names))}, and {ALL}"
            )
        chosen.update(named)
    return sorted(chosen)


def _find_adapted_layers(model: PreTrainedModel) -> dict[str, Linear]:
    """Returns the adapted layers by their plain names; of a plain model none, without importing
    peft."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import Linear

    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def is_adapted(model: PreTrainedModel) -> bool:
    """Whether a model has adapters."""
    return bool(_find_adapted_layers(model))


@contextmanager
def disable_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: the model computes the base model's outputs; only for passes without
    gradient."""
    layers = _find_adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def iterate_merged_weights(
    model: PreTrainedModel, whole: Whole = Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """Yields weights under the plain model's parameter names, W + alpha / rank · B A.

    The sum is computed in float32 and rounded once, to the dtype of W. `whole` is called for every
    parameter, in the same order on every rank, when its weight is due.
    """
    layers = _find_adapted_layers(model)
    adapters = {id(p) for layer in layers.values() for p in _get_lora_matrices(layer)}
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        plain, weight = name.replace(".base_layer.", "."), whole(parameter)
        layer = layers.get(plain.removesuffix(".weight")) if plain.endswith(".weight") else None
        if layer is not None:
            a, b = (whole(side).float() for side in _get_lora_matrices(layer))
            added = layer.scaling[NAME] * (b @ a)
            added = added.T if layer.fan_in_fan_out else added
            weight = (weight.float() + added).to(weight.dtype)
        yield plain, weight
        del weight  # before the next one is gathered


def _get_lora_matrices(layer: Linear) -> tuple[nn.Parameter, nn.Parameter]:
    """Returns A `[rank, in]` and B `[out, rank]`."""
    a, b = (layer.get_parameter(f"lora_{letter}.{NAME}.weight") for letter in "AB")
    return a, b


def adapter_weights(model: PreTrainedModel, whole: Whole = Tensor.detach) -> dict[str, Tensor]:
    """Returns A and B of every adapted layer under peft's checkpoint names; empty for a plain
    model."""
    return {
        f"base_model.model.{name}.lora_{letter}.weight": whole(side)
        for name, layer in _find_adapted_layers(model).items()
        for letter, side in zip("AB", _get_lora_matrices(layer), strict=True)
    }


def write_model(
    policy: Policy, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], folder: Path
) -> None:
    """Writes weights, configuration and tokenizer in the Hugging Face layout.

    Args:
        policy: must have adapters if the trained policy has.
        weights: by name, adapters merged in.
        adapter: from `adapter_weights`; unless empty, written in peft's format to the subfolder
            `adapter`.
    """
    policy.save(folder, weights)
    if adapter:
        from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

        policy.model.peft_config[NAME].save_pretrained(folder / "adapter")
        ready = {name: weight.cpu().contiguous() for name, weight in adapter.items()}
        save_file(ready, folder / "adapter" / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        share_weights(folder / "adapter" / CONFIG_NAME)
