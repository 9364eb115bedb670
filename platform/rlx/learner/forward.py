"""Log-probabilities of chosen tokens, and values before them, from packed rows."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlx.learner.pack import PackedBatch

__all__ = ["PackedPolicy", "PackedValues"]

PLAIN_HEADS = frozenset({"qwen2", "qwen3", "llama", "mistral", "smollm3"})
"""Architectures whose logits are the output embedding times the last hidden state, no more."""


class PackedPolicy(nn.Module):
    """A causal language model that answers for the tokens asked about and no others.

    Args:
        model: a transformers causal language model with scaled-dot-product attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, packed: PackedBatch, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each target, and the entropy of its distribution.

        Args:
            packed: `M` targets.
            temperatures: `[M]` by which logits are divided, the sampler's own.

        Returns:
            `[M]` and `[M]` float32, nats.
        """
        logits = self._logits(packed).float() / temperatures[:, None]
        logprobs = torch.log_softmax(logits, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, packed.targets[:, None])[:, 0], entropy

    def _logits(self, packed: PackedBatch) -> Tensor:
        """`[M, V]`."""
        if self.model.config.model_type in PLAIN_HEADS:
            head: nn.Module = self.model.get_output_embeddings()
            return torch.as_tensor(head(_hidden(self.model.get_decoder(), packed)))
        logits = self.model(**_arguments(packed)).logits.flatten(0, 1)
        return torch.as_tensor(logits.index_select(0, packed.sources))


class PackedValues(nn.Module):
    """A transformer with a value head that answers for the tokens asked about and no others.

    Args:
        decoder: a transformers model without its language head.
        width: of its last hidden state.
        seed: decides the small random weights of the head; its bias is zero.
    """

    def __init__(self, decoder: nn.Module, width: int, seed: int) -> None:
        super().__init__()
        self.decoder = decoder
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = _ValueHead(width)

    def forward(self, packed: PackedBatch) -> Tensor:
        """`[M]` float32: the value before each target, read where the target is predicted."""
        return torch.as_tensor(self.head(_hidden(self.decoder, packed)))


class _ValueHead(nn.Module):
    """Computes in float32 whatever the weights are kept in: bfloat16 knows 0.7 to 0.004 only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / (width + 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[M, D]` to `[M]`."""
        return hidden.float() @ self.weight.float() + self.bias.float()


def _hidden(decoder: nn.Module, packed: PackedBatch) -> Tensor:
    """`[M, D]` last hidden states that predict the targets."""
    hidden = decoder(**_arguments(packed)).last_hidden_state.flatten(0, 1)
    return torch.as_tensor(hidden.index_select(0, packed.sources))


def _arguments(packed: PackedBatch) -> dict[str, Any]:
    return {
        "input_ids": packed.token_ids,
        "position_ids": packed.positions,
        "attention_mask": packed.attention,
        "use_cache": False,
    }
