"""Copies of models: one weight at a time, or of their first layers only.

A large model exists once on the host, as the pages of its files that all ranks share. What goes to
a device goes there weight by weight, in its final precision.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
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

NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index")
"""Attributes with a layer's own number."""


def copy_model(
    model: Module, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Module:
    """Returns a copy of a model, made weight by weight where it shall be.

    Args:
        model: not modified.
        device: of the copy; None for that of the model.
        dtype: of the copy's parameters; None for that of the model. Buffers keep theirs: positions
            need float32.
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

    Layers are of one kind if they have the same modules, with the same numbers and flags, and the
    same entries in the lists of the configuration. A model that does not declare its layers keeps
    them all.
    """
    stacks = [
        (parent, name, layers)
        for parent in model.modules()
        for name, layers in parent.named_children()
        if isinstance(layers, nn.ModuleList) and _are_layers(layers)
    ]
    try:
        for parent, name, layers in stacks:
            setattr(parent, name, layers[: _count_needed(layers, _list_settings(model))])
        yield
    finally:
        for parent, name, layers in stacks:
            setattr(parent, name, layers)


def _are_layers(layers: nn.ModuleList) -> bool:
    return len(layers) > MIN_KEPT_LAYERS and all(
        isinstance(x, GradientCheckpointingLayer) for x in layers
    )


def _list_settings(model: nn.Module) -> list[Sequence[Any]]:
    """The lists in a model's configuration, some of which have an entry for each layer."""
    config: Any = next(m.config for m in model.modules() if hasattr(m, "config"))
    settings = config.get_text_config().to_dict().values()
    return [value for value in settings if isinstance(value, list | tuple)]


def _count_needed(layers: nn.ModuleList, settings: Sequence[Sequence[Any]]) -> int:
    """How many layers there are until each kind has been there."""
    kinds = [
        repr((_describe(layer), [s[n] for s in settings if len(s) >= len(layers)]))
        for n, layer in enumerate(layers)
    ]
    return max(MIN_KEPT_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))


def _describe(layer: nn.Module) -> list[tuple[str, str, Mapping[str, Any]]]:
    """A layer's modules with their numbers and flags, but for its own number."""
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    return [
        (
            name,
            type(module).__name__,
            {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, bool | int | float | str | None) and key not in NUMBERS
            }
            | {key: shape for key, shape in shapes.items() if not name},
        )
        for name, module in layer.named_modules()
    ]


class StoredForm:
    """The form in which weights of a model are stored.

    Args:
        model: before adapters are added; not kept.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        with torch.device("meta"):
            self._shape = type(model)(copy.deepcopy(model.config))
        self._shape._weight_conversions = getattr(model, "_weight_conversions", None)

    def convert(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts weights from the names of the model's parameters, as `save_pretrained` does."""
        stored: dict[str, Tensor] = revert_weight_conversion(self._shape, dict(weights))
        return stored
