"""Key-value caches that grow in place, fork at branch points, and drop finished rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

__all__ = ["Cache", "CachedRows"]


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Appends into spare room, so that a decoding step copies one token and not all of them."""

    def __init__(self, keys: Tensor, values: Tensor, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._room = _with_room(keys, room), _with_room(values, room)
        self.keys, self.values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start, stop = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if stop > self._room[0].shape[2]:
            self._room = _with_room(self.keys, stop), _with_room(self.values, stop)
        for buffer, new in zip(self._room, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = new
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self._room)
        return self.keys, self.values


def _with_room(states: Tensor, room: int) -> Tensor:
    rows, heads, length, width = states.shape
    buffer = states.new_empty(rows, heads, length + room, width)
    buffer[:, :, :length] = states
    return buffer


class Cache:
    """Keys and values of `R` rows over `L` columns, and which columns hold a token of which row.

    Attributes:
        layers: for every layer, keys and values `[R, heads, L, width]`.
        is_token: `[R, L]` bool.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], is_token: Tensor) -> None:
        self.layers = tuple(layers)
        self.is_token = is_token

    def select(self, rows: Tensor) -> "Cache":
        """The named rows, in that order; a row may be taken any number of times."""
        kept = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.layers]
        return Cache(kept, self.is_token.index_select(0, rows))

    def trimmed(self) -> "Cache":
        """Without the leading columns in which no row has a token."""
        start = int(self.is_token.any(dim=0).to(torch.int8).argmax())
        if start == 0:
            return self
        layers = [(k[:, :, start:], v[:, :, start:]) for k, v in self.layers]
        return Cache(layers, self.is_token[:, start:])

    def growing(self, room: int) -> DynamicCache:
        """A transformers cache that starts with these rows and appends into `room` columns."""
        cache = DynamicCache()
        cache.layers = [_GrowingLayer(k, v, room) for k, v in self.layers]
        return cache

    @staticmethod
    def of(cache: DynamicCache, is_token: Tensor) -> "Cache":
        """Freezes a transformers cache, with the columns that hold tokens."""
        return Cache([(layer.keys, layer.values) for layer in cache.layers], is_token)

    @staticmethod
    def join(caches: Sequence["Cache"]) -> "Cache":
        """Rows of all caches below one another; shorter ones are padded on the left."""
        if len(caches) == 1:
            return caches[0]
        length = max(c.is_token.shape[1] for c in caches)
        pads = [length - c.is_token.shape[1] for c in caches]
        grow = torch.nn.functional.pad
        layers = [
            tuple(
                torch.cat(
                    [grow(c.layers[i][j], (0, 0, p, 0)) for c, p in zip(caches, pads, strict=True)]
                )
                for j in range(2)
            )
            for i in range(len(caches[0].layers))
        ]
        is_token = torch.cat([grow(c.is_token, (p, 0)) for c, p in zip(caches, pads, strict=True)])
        return Cache([(k, v) for k, v in layers], is_token)


class CachedRows:
    """Caches of many completions, found again by the completion's number."""

    def __init__(self) -> None:
        self._where: list[tuple[Cache, int]] = []

    def add(self, places: Sequence[tuple[Cache, int]]) -> None:
        """Remembers, for each of the next completions, the cache and the row that hold it."""
        self._where += places

    def take(self, numbers: Sequence[int]) -> Cache:
        """The caches of the numbered completions, one below the other."""
        by_cache: dict[int, tuple[Cache, list[int], list[int]]] = {}
        for position, number in enumerate(numbers):
            cache, row = self._where[number]
            entry = by_cache.setdefault(id(cache), (cache, [], []))
            entry[1].append(row)
            entry[2].append(position)
        parts = list(by_cache.values())
        joined = Cache.join(
            [c.select(torch.tensor(rows, device=c.is_token.device)) for c, rows, _ in parts]
        )
        order = torch.tensor([p for _, _, positions in parts for p in positions])
        if order.tolist() == list(range(len(numbers))):
            return joined.trimmed()
        return joined.select(order.argsort().to(joined.is_token.device)).trimmed()
