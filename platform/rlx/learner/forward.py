"""Log-probabilities of chosen tokens, from packed rows."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlx.learner.pack import PackedBatch

__all__ = ["PackedPolicy"]

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
        arguments = {
            "input_ids": packed.token_ids,
            "position_ids": packed.positions,
            "attention_mask": packed.attention,
            "use_cache": False,
        }
        if self.model.config.model_type in PLAIN_HEADS:
            hidden = self.model.get_decoder()(**arguments).last_hidden_state.flatten(0, 1)
            head: nn.Module = self.model.get_output_embeddings()
            return torch.as_tensor(head(hidden.index_select(0, packed.sources)))
        logits = self.model(**arguments).logits.flatten(0, 1)
        return torch.as_tensor(logits.index_select(0, packed.sources))
