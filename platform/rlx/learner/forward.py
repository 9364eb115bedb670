"""Log-probabilities of chosen tokens, and values before them, from packed trees."""

import inspect
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlx.errors import SpecError
from rlx.learner.forms import ForwardForm
from rlx.learner.pack import PackedBatch

__all__ = ["PackedModule", "PackedPolicy", "PackedValues"]


class PackedModule(nn.Module, ABC):
    """A transformer that answers for the tokens asked about and no others.

    Args:
        model: whose attention the form decides.

    Attributes:
        form: how packed trees are computed; set by `use`.
    """

    form: ForwardForm

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._own = model.config._attn_implementation

    def recompute_layers(self) -> None:
        """Keeps only what enters each layer; the backward pass computes the rest once more.

        Raises:
            SpecError: the model does not say what its layers are.
        """
        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise SpecError(
                "runner.activation_checkpointing: a model of the kind "
                f"{self.model.config.model_type!r} has no layers that can be computed again"
            )
        for layer in layers:  # transformers' own switch would turn dropout on
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def use(self, form: ForwardForm) -> None:
        """Computes in another way from now on."""
        attention = form.attention or self._own
        if attention != self.model.config._attn_implementation:
            self.model.set_attn_implementation(attention)
        self.form = form

    @abstractmethod
    def read(self, at: Tensor, **arguments: Any) -> Tensor:
        """As `rlx.learner.forms.OutputReader`, for what the transformer itself gives."""

    def outputs(self, packed: PackedBatch) -> Tensor:
        """`[M, W]` the model's output that each target is predicted from."""
        return self.form(self.read, packed)


class PackedPolicy(PackedModule):
    """A causal language model.

    Args:
        model: of transformers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def read(self, at: Tensor, **arguments: Any) -> Tensor:
        """`[M, V]` logits, computed only at positions where one of them is wanted."""
        rows, length = arguments["input_ids"].shape
        if not self._keeps:
            logits = self.model(**arguments).logits
            return torch.as_tensor(logits.flatten(0, 1).index_select(0, at))
        if rows == 1:
            return torch.as_tensor(self.model(**arguments, logits_to_keep=at).logits[0])
        kept, where = (at % length).unique(return_inverse=True)
        logits = self.model(**arguments, logits_to_keep=kept).logits.flatten(0, 1)
        return torch.as_tensor(logits.index_select(0, at // length * len(kept) + where))

    def forward(self, packed: PackedBatch, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each target, and the entropy of its distribution.

        Args:
            packed: `M` targets.
            temperatures: `[M]` by which logits are divided, the sampler's own.

        Returns:
            `[M]` and `[M]` float32, nats.
        """
        logits = self.outputs(packed).float() / temperatures[:, None]
        logprobs = torch.log_softmax(logits, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, packed.targets[:, None])[:, 0], entropy


class PackedValues(PackedModule):
    """A transformer with a value head.

    Args:
        decoder: a transformers model without its language head.
        width: of its last hidden state.
        seed: decides the small random weights of the head; its bias is zero.
    """

    def __init__(self, decoder: PreTrainedModel, width: int, seed: int) -> None:
        super().__init__(decoder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = _ValueHead(width)

    def read(self, at: Tensor, **arguments: Any) -> Tensor:
        """`[M, D]` last hidden states."""
        hidden = self.model(**arguments).last_hidden_state
        return torch.as_tensor(hidden.flatten(0, 1).index_select(0, at))

    def forward(self, packed: PackedBatch) -> Tensor:
        """`[M]` float32: the value before each target, read where the target is predicted."""
        return torch.as_tensor(self.head(self.outputs(packed)))


class _ValueHead(nn.Module):
    """Computes in float32 whatever the weights are kept in: bfloat16 knows 0.7 to 0.004 only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / (width + 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[M, D]` to `[M]`."""
        return hidden.float() @ self.weight.float() + self.bias.float()
