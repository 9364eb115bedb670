"""Decoding without a cache: every token is sampled after the whole dialogue has been read again.

Slow, but it asks nothing of a model except that later tokens do not change earlier outputs, so it
serves recurrent and hybrid models, and those with an attention of their own.
"""

import inspect
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlx.sampler.rows import COMPACT_BELOW

__all__ = ["RereadingDecoder"]


class RereadingDecoder:
    """Decodes with any causal model of transformers.

    Args:
        model: called unchanged.
        why: why a cache cannot be used.
    """

    def __init__(self, model: PreTrainedModel, why: str) -> None:
        self._model = model
        self.name = "its own forward pass"
        self.description = f"the model's own forward pass over the whole dialogue: {why}"

    def start(self, rows: int) -> "RereadRows":
        """See `rlx.sampler.rows.Decoder`."""
        return RereadRows(self._model, [[] for _ in range(rows)])


class RereadRows:
    """See `rlx.sampler.rows.DialogueRows`.

    Args:
        model: called unchanged.
        tokens: those of every dialogue.
    """

    compact_below = COMPACT_BELOW

    def __init__(self, model: PreTrainedModel, tokens: list[list[int]]) -> None:
        self._model, self._tokens = model, tokens
        self._keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def read(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        """See `DialogueRows`."""
        for tokens, new in zip(self._tokens, fresh, strict=True):
            tokens += new
        return self._compute_next_logits()

    def step(self, tokens: Tensor) -> Tensor:
        """See `DialogueRows`."""
        return self.read(tokens[:, None].tolist(), 0)

    def _compute_next_logits(self) -> Tensor:
        """Returns `[R, V]`. Padding is on the right, where no token sees it."""
        width = max(map(len, self._tokens))
        rows = [tokens + [0] * (width - len(tokens)) for tokens in self._tokens]
        last = torch.tensor([len(tokens) - 1 for tokens in self._tokens])
        kept, where = last.unique(return_inverse=True)
        if not self._keeps:
            kept, where = torch.arange(width), last
        device = self._model.device
        limited = {"logits_to_keep": kept.to(device)} if self._keeps else {}
        ids = torch.tensor(rows, device=device)
        logits = self._model(input_ids=ids, use_cache=False, **limited).logits
        return torch.as_tensor(logits[torch.arange(len(rows)), where])

    def fork(self, copies: Sequence[int], room: int) -> Self:
        """See `DialogueRows`."""
        return type(self)(self._model, [list(self._tokens[row]) for row in copies])

    def select(self, rows: Sequence[int], room: int) -> Self:
        """See `DialogueRows`."""
        return self.fork(rows, room)

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        """See `DialogueRows`."""
        kept = self.fork(rows, 0)
        for tokens, count in zip(kept._tokens, excess, strict=True):
            del tokens[len(tokens) - count :]
        return kept

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        """See `DialogueRows`."""
        tokens = [list(source._tokens[row]) for source, row in places]
        return cls(places[0][0]._model, tokens)
