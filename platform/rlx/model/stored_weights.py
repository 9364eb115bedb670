"""Weights under the names and in the shapes of a model's files.

transformers computes some architectures with other parameters than their files have: it stacks the
experts of a mixture in one parameter, for example. Other implementations read what the files have.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

__all__ = ["StoredForm"]


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
