"""Copies of models, one weight at a time, and models that have only their first layers."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

Module = TypeVar("Module", bound=nn.Module)
MIN_KEPT_LAYERS = 2
"""Minimum number of layers to keep: the second one reads what the first one wrote."""


def copy_model(
    model: Module, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Module:
    """Returns a copy of a model, made weight by weight on a device (None: the model's own).

    `dtype` is that of the parameters; buffers keep theirs, since positions need float32.
    """
    return _rebuild(
        model,
        lambda parameter: parameter.to(device or parameter.device, dtype, copy=True),
        lambda buffer: buffer.to(device or buffer.device, copy=True),
    )


def share_model(model: Module) -> Module:
    """Returns a second model with the same weights, which are not copied.

    Either model may replace a parameter's data; writing into them changes both.
    """
    return _rebuild(model, lambda parameter: parameter, lambda buffer: buffer.clone())


def _rebuild(
    model: Module, convert: Callable[[Tensor], Tensor], convert_buffer: Callable[[Tensor], Tensor]
) -> Module:
    """Copies the modules of a model around converted weights; tied ones stay tied."""
    made: dict[int, Any] = {
        id(p): nn.Parameter(convert(p.detach()), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    made |= {id(buffer): convert_buffer(buffer.detach()) for buffer in model.buffers()}
    return copy.deepcopy(model, made)


def convert_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds a model's parameters to another precision in place, one at a time; not its buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@contextmanager
def keep_first_layers(model: nn.Module) -> Iterator[None]:
    """Context manager: the model has only its first layers, at least one of every kind.

    Layers are of one kind if they print the same, and have the same entries in the lists of the
    configuration. A model that does not declare its layers keeps them all.
    """
    config: Any = next(m.config for m in model.modules() if hasattr(m, "config"))
    listed = [v for v in config.get_text_config().to_dict().values() if isinstance(v, list | tuple)]

    def count_needed(layers: nn.ModuleList) -> int:
        kinds = [
            repr((layer, [each[n] for each in listed if len(each) >= len(layers)]))
            for n, layer in enumerate(layers)
        ]
        return max(MIN_KEPT_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))

    stacks = [
        (parent, name, layers)
        for parent in model.modules()
        for name, layers in parent.named_children()
        if isinstance(layers, nn.ModuleList)
        and len(layers) > MIN_KEPT_LAYERS
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
    ]
    try:
        for parent, name, layers in stacks:
            setattr(parent, name, layers[: count_needed(layers)])
        yield
    finally:
        for parent, name, layers in stacks:
            setattr(parent, name, layers)


class StoredForm:
    """The form in which a model, before adapters are added, stores its weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        with torch.device("meta"):
            self._shape = type(model)(copy.deepcopy(model.config))
        self._shape._weight_conversions = getattr(model, "_weight_conversions", None)

    def convert(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts weights from the names of the model's parameters, as `save_pretrained` does."""
        stored: dict[str, Tensor] = revert_weight_conversion(self._shape, dict(weights))
        return stored
