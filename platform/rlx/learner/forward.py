"""Modules that compute log-probabilities and values of selected tokens from packed trees."""

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
from rlx.learner.terms import compute_token_logprobs
from rlx.model import build_attention_mask
from rlx.ordered_sums import take_rows


class PackedModule(nn.Module, ABC):
    """A transformer that computes outputs only for the requested tokens.

    Args:
        model: the form may replace its attention.

    Attributes:
        form: how packed trees are computed; set by `use`.
    """

    form: ForwardForm

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._own = model.config._attn_implementation

    def recompute_layers(self) -> None:
        """Enables activation checkpointing: layers are recomputed in the backward pass.

        Raises:
            SpecError: the model does not declare its layers.
        """
        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise SpecError(
                "runner.activation_checkpointing: a model of kind "
                f"{self.model.config.model_type!r} has no layers that can be recomputed"
            )
        for layer in layers:  # transformers' own option would need training mode, thus dropout
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def keep_activations(self) -> None:
        """Undoes `recompute_layers`."""
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                vars(module).pop("forward", None)

    def use(self, form: ForwardForm) -> None:
        """Selects the form of all further calls."""
        attention = form.attention or self._own
        if attention != self.model.config._attn_implementation:
            self.model.set_attn_implementation(attention)
        self.form = form

    def _read_masked(self, at: Tensor, **arguments: Any) -> Tensor:
        """See `rlx.learner.forms.OutputReader`."""
        if "visible" in arguments:
            arguments["attention_mask"] = build_attention_mask(
                self.model.config,
                arguments.pop("visible"),
                arguments.pop("queries"),
                arguments.pop("keys"),
                self.model.dtype,  # every attention takes an additive mask
            )
        return self.read(at, **arguments)

    @abstractmethod
    def read(self, at: Tensor, **arguments: Any) -> Tensor:
        """Returns `[M, W]` outputs of the transformer itself at the indices `at`, `[M]`."""

    def outputs(self, packed: PackedBatch) -> Tensor:
        """Returns the `[M + U, W]` outputs that targets, then branches are predicted from."""
        return self.form(self._read_masked, packed)


class PackedPolicy(PackedModule):
    """A causal language model on packed trees.

    Args:
        model: a transformers model.

    Attributes:
        chunks_logits: compute logits by chunks of the vocabulary; see `choose_logits`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.chunks_logits = False
        self._keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def read(self, at: Tensor, **arguments: Any) -> Tensor:
        """Returns `[M, V]` logits, computed only at the positions that are needed; with chunks the
        `[M, D]` hidden states that they follow from."""
        if self.chunks_logits:
            hidden = self.model.get_decoder()(**arguments).last_hidden_state
            return torch.as_tensor(take_rows(hidden.flatten(0, 1), at))
        rows, length = arguments["input_ids"].shape
        if not self._keeps:
            logits = self.model(**arguments).logits
            return torch.as_tensor(take_rows(logits.flatten(0, 1), at))
        if rows == 1:
            return torch.as_tensor(self.model(**arguments, logits_to_keep=at).logits[0])
        kept, where = (at % length).unique(return_inverse=True)
        logits = self.model(**arguments, logits_to_keep=kept).logits.flatten(0, 1)
        return torch.as_tensor(take_rows(logits, at // length * len(kept) + where))

    def forward(
        self,
        packed: PackedBatch,
        temperatures: Tensor,
        branch_temperatures: Tensor | None = None,
        *,
        learns_entropy: bool = False,
        with_collisions: bool = False,
    ) -> tuple[Tensor, ...]:
        """Returns the log-probability of each target, and the entropy of its distribution.

        Args:
            packed: micro-batch with `M` targets.
            temperatures: `[M]` sampling temperatures; logits are divided by them.
            branch_temperatures: `[U]` likewise for the states of the branches; None without any.
            learns_entropy: whether the entropy has a gradient, which takes memory.
            with_collisions: also return `[M]` Σ π² of each distribution.

        Returns:
            `[M]` and `[M]` float32, nats; with branches also `[K]`, the log-probability of each of
            their tokens.
        """
        outputs = self.outputs(packed)
        if self.chunks_logits and with_collisions:
            return self._compute_collisions_by_chunks(outputs, packed, temperatures)
        if self.chunks_logits:
            return self._forward_chunks(
                outputs, packed, temperatures, branch_temperatures, learns_entropy
            )
        outputs, count = outputs.float(), len(temperatures)
        logprobs = torch.log_softmax(outputs[:count] / temperatures[:, None], dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns_entropy):
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        chosen = logprobs.gather(1, packed.targets[:, None])[:, 0]
        if with_collisions:
            return chosen, entropy, (2 * logprobs).exp().sum(dim=-1)
        if branch_temperatures is None:
            return chosen, entropy
        next_tokens = torch.log_softmax(outputs[count:] / branch_temperatures[:, None], dim=-1)
        branches = packed.branches
        return chosen, entropy, next_tokens[branches.states, branches.tokens]

    def _forward_chunks(
        self,
        hidden: Tensor,
        packed: PackedBatch,
        temperatures: Tensor,
        branch_temperatures: Tensor | None,
        learns_entropy: bool,
    ) -> tuple[Tensor, ...]:
        """Like `forward`, from the `[M + U, D]` hidden states."""
        count, tokens = len(temperatures), packed.targets
        states = torch.arange(count, device=hidden.device)
        if branch_temperatures is not None:
            branches = packed.branches
            states = torch.cat([states, count + branches.states])
            tokens = torch.cat([tokens, branches.tokens])
            temperatures = torch.cat([temperatures, branch_temperatures])
        head = self.model.get_output_embeddings()
        logprobs, entropy = compute_token_logprobs(
            hidden, head.weight, head.bias, temperatures, states, tokens
        )
        entropy = entropy[:count] if learns_entropy else entropy[:count].detach()
        if branch_temperatures is None:
            return logprobs, entropy
        return logprobs[:count], entropy, logprobs[count:]

    def _compute_collisions_by_chunks(
        self, hidden: Tensor, packed: PackedBatch, temperatures: Tensor
    ) -> tuple[Tensor, ...]:
        """Also returns Σ π², which half the temperature gives with any token t:

        log Σ π² = logsumexp 2z - 2 logsumexp z = 2 log π(t) - log π'(t),  π' = softmax 2z.
        """
        logprobs, entropy = self._forward_chunks(hidden, packed, temperatures, None, False)
        sharper, _ = self._forward_chunks(hidden, packed, temperatures / 2, None, False)
        return logprobs, entropy, (2 * logprobs - sharper).exp()


class PackedValues(PackedModule):
    """A transformer with a value head, on packed trees.

    Args:
        decoder: a transformers model without its language-model head.
        width: size of its last hidden state.
        seed: seed of the head's small random weights; the bias is zero.
    """

    def __init__(self, decoder: PreTrainedModel, width: int, seed: int) -> None:
        super().__init__(decoder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = _ValueHead(width)

    def read(self, at: Tensor, **arguments: Any) -> Tensor:
        """Returns `[M, D]` last hidden states."""
        hidden = self.model(**arguments).last_hidden_state
        return torch.as_tensor(take_rows(hidden.flatten(0, 1), at))

    def forward(self, packed: PackedBatch) -> Tensor:
        """Returns `[M]` float32: the value of the state before each target."""
        return torch.as_tensor(self.head(self.outputs(packed)))


class _ValueHead(nn.Module):
    """Linear head in float32 whatever the dtype of the weights: at 0.7, bfloat16 has a resolution
    of only 0.004."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / (width + 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `[M, D]` to `[M]`."""
        return hidden.float() @ self.weight.float() + self.bias.float()
