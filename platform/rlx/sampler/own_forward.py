"""Decoding with a model's own forward pass: with a KV cache per row, or without a cache."""

import inspect
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from rlx.model import build_attention_mask
from rlx.sampler.rows import COMPACT_BELOW


class CachedDecoder:
    """Decodes with a transformers model, called unchanged; `why` no faster decoder can be used."""

    def __init__(self, model: PreTrainedModel, why: str) -> None:
        self._model = model
        self.description = f"the model's own forward pass: {why}"

    def start(self, rows: int) -> "CachedRows":
        return CachedRows(
            self._model, None, torch.zeros(rows, 0, dtype=torch.bool).to(self._model.device)
        )


class CachedRows:
    """See `rlx.sampler.rows.DialogueRows`.

    Args:
        cache: keys and values of `R` rows over `L` columns; None before the first prefill.
        is_token: `[R, L]` bool, False for padding.
    """

    compact_below = COMPACT_BELOW

    def __init__(
        self, model: PreTrainedModel, cache: DynamicCache | None, is_token: Tensor
    ) -> None:
        self._model, self._cache, self._is_token = model, cache, is_token

    def prefill(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        device = self._is_token.device
        width = max(map(len, fresh))
        ids = torch.zeros(len(fresh), width, dtype=torch.int64)
        is_new = torch.zeros(len(fresh), width, dtype=torch.bool)
        for row, tokens in enumerate(fresh):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            is_new[row, width - len(tokens) :] = True
        return self._forward(ids.to(device), is_new.to(device))

    def step(self, tokens: Tensor) -> Tensor:
        return self._forward(tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.bool))

    def _forward(self, ids: Tensor, is_new: Tensor) -> Tensor:
        width = ids.shape[1]
        self._is_token = torch.cat([self._is_token, is_new], dim=1)
        self._cache = self._cache or DynamicCache()
        positions = (self._is_token.cumsum(dim=1) - 1).clamp(min=0)
        column = torch.arange(positions.shape[1], device=positions.device)
        row = column[-width:, None]
        # A padding column attends to itself, since a softmax over nothing is NaN.
        visible = (column <= row) & self._is_token[:, None, :] | (column == row)
        eager = self._model.config._attn_implementation == "eager"  # takes no bool masks
        output = self._model(
            input_ids=ids,
            position_ids=positions[:, -width:],
            attention_mask=build_attention_mask(
                self._model.config,
                visible[:, None],
                positions[:, -width:],
                positions,
                self._model.dtype if eager else None,
            ),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def fork(self, copies: Sequence[int], room: int) -> Self:
        return self.select(copies, room)

    def select(self, rows: Sequence[int], room: int) -> Self:
        index = torch.tensor(rows, device=self._is_token.device)
        is_token = self._is_token.index_select(0, index)
        some = is_token.any(dim=0)  # from the first column with a token on
        start = int(some.to(torch.int8).argmax()) if len(some) else 0
        cache = DynamicCache()
        for number, layer in enumerate(self._layers):
            cache.update(*(side[:, :, start:].index_select(0, index) for side in layer), number)
        return type(self)(self._model, cache, is_token[:, start:])

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        kept = self.select(rows, 0)
        behind = kept._is_token.flip(1).cumsum(dim=1).flip(1)
        kept._is_token &= behind > torch.tensor(excess, device=behind.device)[:, None]
        return kept

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        sources: dict[int, tuple[Self, list[int], list[int]]] = {}
        for position, (source, row) in enumerate(places):
            _, rows, positions = sources.setdefault(id(source), (source, [], []))
            rows.append(row)
            positions.append(position)
        batches = [source.select(rows, 0) for source, rows, _ in sources.values()]
        order = torch.tensor([p for _, _, positions in sources.values() for p in positions])
        # All together, shorter ones padded on the left.
        length = max(batch._is_token.shape[1] for batch in batches)
        pads = [length - batch._is_token.shape[1] for batch in batches]
        cache = DynamicCache()
        for number, layers in enumerate(zip(*(batch._layers for batch in batches), strict=True)):
            keys, values = (
                torch.cat([pad(kept, (0, 0, n, 0)) for kept, n in zip(side, pads, strict=True)])
                for side in zip(*layers, strict=True)
            )
            cache.update(keys, values, number)
        is_token = [pad(batch._is_token, (n, 0)) for batch, n in zip(batches, pads, strict=True)]
        joined = cls(batches[0]._model, cache, torch.cat(is_token))
        return joined.select(order.argsort().tolist(), room)

    @property
    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        layers = () if self._cache is None else self._cache.layers
        return [(layer.keys, layer.values) for layer in layers]


class UncachedDecoder:
    """Decodes with any causal model of transformers, called unchanged; `why` no cache can be used.

    Every token is sampled after the whole dialogue has been read again. That is slow, but it serves
    recurrent and hybrid models, and those with an attention of their own.
    """

    def __init__(self, model: PreTrainedModel, why: str) -> None:
        self._model = model
        self.description = f"the model's own forward pass over the whole dialogue: {why}"

    def start(self, rows: int) -> "UncachedRows":
        return UncachedRows(self._model, [[] for _ in range(rows)])


class UncachedRows:
    """See `rlx.sampler.rows.DialogueRows`; `tokens` are those of every dialogue."""

    compact_below = COMPACT_BELOW

    def __init__(self, model: PreTrainedModel, tokens: list[list[int]]) -> None:
        self._model, self._tokens = model, tokens
        self._keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def prefill(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        for tokens, new in zip(self._tokens, fresh, strict=True):
            tokens += new
        width = max(map(len, self._tokens))  # padding is on the right, where no token sees it
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

    def step(self, tokens: Tensor) -> Tensor:
        return self.prefill(tokens[:, None].tolist(), 0)

    def fork(self, copies: Sequence[int], room: int) -> Self:
        return type(self)(self._model, [list(self._tokens[row]) for row in copies])

    def select(self, rows: Sequence[int], room: int) -> Self:
        return self.fork(rows, room)

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        kept = self.fork(rows, 0)
        for tokens, count in zip(kept._tokens, excess, strict=True):
            del tokens[len(tokens) - count :]
        return kept

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        tokens = [list(source._tokens[row]) for source, row in places]
        return cls(places[0][0]._model, tokens)
