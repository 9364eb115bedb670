"""Decoding with a model's own forward pass and a KV cache per row."""

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
