"""KV cache of dialogues that share prefixes, and attention to it: to ancestors, batched over the
rows below each, and to a suffix of each row."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rlx.sampler.plain_decoder import PlainDecoder


@dataclass(frozen=True, slots=True, eq=False)
class AncestorLevel:
    """Ancestors of one depth.

    Attributes:
        keys: `[layers, kv_heads, N, width, L]`.
        values: `[layers, kv_heads, N, L, width]`.
        lengths: tokens of each ancestor; columns beyond them are finite padding.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]

    @property
    def is_ragged(self) -> bool:
        return len(set(self.lengths)) > 1


@dataclass(frozen=True, slots=True, eq=False)
class RowSuffixes:
    """Keys and values of each row's own tokens, `[layers, kv_heads, R, room, width]`, and how many
    each row has. Columns beyond the longest row are uninitialized."""

    keys: Tensor
    values: Tensor
    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def room(self) -> int:
        return self.keys.shape[3]

    def blank(self, stop: int) -> None:
        """Zeroes the columns from the longest row to `stop`, since masked values must be finite."""
        for states in (self.keys, self.values):
            states[:, :, :, self.longest : stop] = 0

    @staticmethod
    def gather_rows(
        places: Sequence[tuple["RowSuffixes", int]], lengths: list[int], room: int
    ) -> "RowSuffixes":
        """Copies single rows, cut to `lengths`, with `room` for more columns."""
        sources: dict[int, tuple[RowSuffixes, list[int], list[int]]] = {}
        for position, (suffix, row) in enumerate(places):
            _, rows, positions = sources.setdefault(id(suffix), (suffix, [], []))
            rows.append(row)
            positions.append(position)
        longest, whole = max(lengths), list(range(len(places)))
        like = places[0][0].keys
        first, rows, _ = next(iter(sources.values()))
        if len(sources) == 1 and rows == list(range(len(first.lengths))) and not room:
            keys, values = (states[:, :, :, :longest] for states in (first.keys, first.values))
            return RowSuffixes(keys, values, lengths)
        layers, heads, _, _, width = like.shape
        both = [like.new_empty(layers, heads, len(places), longest + room, width) for _ in range(2)]
        for suffix, rows, positions in sources.values():
            taken = min(longest, suffix.longest)
            picked = slice(None) if rows == list(range(len(suffix.lengths))) else rows
            put = slice(None) if positions == whole else positions
            for buffer, states in zip(both, (suffix.keys, suffix.values), strict=True):
                for new, old in zip(buffer, states, strict=True):  # picking makes one more copy
                    new[:, put, :taken] = old[:, picked, :taken]
                buffer[:, :, put, taken:longest] = 0
        return RowSuffixes(both[0], both[1], lengths)


def join_levels(places: Sequence[tuple[AncestorLevel, int]]) -> tuple[AncestorLevel, list[int]]:
    """Joins ancestors of several levels into one; returns it and the index of each ancestor."""
    used: dict[int, tuple[AncestorLevel, dict[int, None]]] = {}
    for level, place in places:
        used.setdefault(id(level), (level, {}))[1][place] = None
    if len(used) == 1:
        return places[0][0], [place for _, place in places]
    longest = max(max(level.lengths[p] for p in at) for level, at in used.values())
    keys, values = [], []
    lengths: list[int] = []
    numbers: dict[tuple[int, int], int] = {}
    for key, (level, at) in used.items():
        index = torch.tensor(list(at), device=level.keys.device)
        pad = max(0, longest - level.keys.shape[-1])
        found = level.keys.index_select(2, index), level.values.index_select(2, index)
        keys.append(functional.pad(found[0], (0, pad))[..., :longest])
        values.append(functional.pad(found[1], (0, 0, 0, pad))[..., :longest, :])
        numbers |= {(key, place): len(lengths) + n for n, place in enumerate(at)}
        lengths += [level.lengths[place] for place in at]
    level = AncestorLevel(torch.cat(keys, dim=2), torch.cat(values, dim=2), lengths)
    return level, [numbers[id(source), place] for source, place in places]


PRUNE_BELOW = 0.75
"""Ancestors without rows are dropped once the fraction of ancestors with rows is below this."""


class AncestorGroup:
    """Rows grouped by their ancestors of one level, with an equal number for each, padded if
    necessary."""

    def __init__(self, level: AncestorLevel, at: list[int]) -> None:
        count, used = len(level.lengths), sorted(set(at))
        keys, values = level.keys, level.values
        if len(used) < PRUNE_BELOW * count:
            index = torch.tensor(used, device=keys.device)
            keys, values = keys.index_select(2, index), values.index_select(2, index)
            number = {place: n for n, place in enumerate(used)}
            at, count = [number[place] for place in at], len(used)
        self.length = keys.shape[-1]
        self._keys, self._values = split_by_layer(keys), split_by_layer(values)
        below = Counter(at)
        self._most = max(below.values())
        self._count = count
        self._slots = None  # index of each row among the `N * most` slots
        if at != [n for n in range(count) for _ in range(self._most)]:
            nth: Counter[int] = Counter()
            slots = []
            for place in at:
                slots.append(place * self._most + nth[place])
                nth[place] += 1
            self._slots = torch.tensor(slots, device=keys.device)

    def scores(self, layer: int, q: Tensor) -> Tensor:
        """Returns `[kv_heads, R, rep, L]` scores of queries `[kv_heads, R, rep, width]`."""
        return self._times(q, self._keys[layer])

    def mix_values(self, layer: int, p: Tensor) -> Tensor:
        """Returns `[kv_heads, R, rep, width]`: values weighted with `p` `[kv_heads, R, rep, L]`."""
        return self._times(p, self._values[layer])

    def _times(self, rows: Tensor, ancestors: Tensor) -> Tensor:
        heads, _, rep, width = rows.shape
        if self._slots is not None:
            spread = rows.new_zeros(heads, self._count * self._most, rep, width)
            rows = spread.index_copy_(1, self._slots, rows)
        together = rows.flatten(0, 1).unflatten(0, (-1, self._most)).flatten(1, 2)
        product = torch.bmm(together, ancestors).view(heads, -1, rep, ancestors.shape[-1])
        return product if self._slots is None else product.index_select(1, self._slots)


class SharedContext:
    """Keys and values that rows attend to: `shared` columns of ancestors of every level, and their
    own suffixes."""

    def __init__(
        self, levels: Sequence[tuple[AncestorLevel, list[int]]], suffix: RowSuffixes
    ) -> None:
        self._groups = [AncestorGroup(level, at) for level, at in levels]
        self._keys, self._values = split_by_layer(suffix.keys), split_by_layer(suffix.values)
        self.shared = sum(group.length for group in self._groups)

    def attend(self, layer: int, q: Tensor, stop: int, bias: Tensor | None) -> Tensor:
        """Computes attention of scaled queries `[kv_heads, R, n, width]`, in the same shape.

        Args:
            stop: number of suffix columns to attend to.
            bias: added to the scores, `[R, n or 1, shared + stop]`.
        """
        keys, values = self._keys[layer][:, :stop], self._values[layer][:, :stop]
        scores = torch.bmm(q.flatten(0, 1), keys.transpose(1, 2)).view(*q.shape[:3], stop)
        if self._groups:
            above = [group.scores(layer, q) for group in self._groups]
            scores = torch.cat([*above, scores], dim=-1)
        if bias is not None:
            scores += bias
        p = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.bmm(p.flatten(0, 1)[..., self.shared :], values).view_as(q)
        start = 0
        for group in self._groups:
            mixed += group.mix_values(layer, p[..., start : start + group.length])
            start += group.length
        return mixed


SCORES = 1 << 23
"""Maximum scores that a prefill holds in memory at once; a few copies of them exist."""


def split_by_layer(kept: Tensor) -> tuple[Tensor, ...]:
    """Splits keys or values by layer, with heads and rows flattened."""
    return kept.flatten(1, 2).unbind()


class PrefillAttention:
    """Attention of many new tokens per row.

    Attributes:
        rows: `[n]` row of every new token.
        columns: `[n]` index of every new token among its row's new tokens.
    """

    def __init__(
        self,
        decoder: PlainDecoder,
        levels: Sequence[tuple[AncestorLevel, list[int]]],
        suffix: RowSuffixes,
        counts: list[int],
    ) -> None:
        device = decoder.template_tensor.device
        self._decoder, self._suffix = decoder, suffix
        self._count, self._width = len(counts), max(counts)
        count = torch.tensor(counts, device=device)
        rows = torch.arange(len(counts), device=device)
        self.rows = rows.repeat_interleave(count, output_size=sum(counts))
        first = count.cumsum(0) - count
        self.columns = torch.arange(sum(counts), device=device) - first[self.rows]
        known = torch.tensor(suffix.lengths, device=device)
        self._where = known[self.rows] + self.columns
        self._slots = None  # index of each new token among the `R * width` slots
        if len(set(counts)) > 1:
            self._slots = self.rows * self._width + self.columns
        self._is_first = not levels and not suffix.longest
        if self._is_first:
            return
        self._seen, self._stop = SharedContext(levels, suffix), suffix.longest + self._width
        last = known[:, None] + torch.arange(self._width, device=device)
        own = torch.arange(self._stop, device=device) <= last[:, :, None]
        shared = [
            seen[:, None].expand(-1, self._width, -1)
            for seen in _build_ancestor_masks(levels, device)
        ]
        self._unseen = ~torch.cat([*shared, own], dim=-1)
        row = decoder.heads * len(counts) * self._unseen.shape[-1]
        self._slice = max(1, SCORES // row)
        # All layers share a small bias; a large one is computed slice by slice.
        self._bias = self._build_attention_bias(slice(None)) if self._width <= self._slice else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for kept, new in ((self._suffix.keys, k), (self._suffix.values, v)):
            kept[layer][:, self.rows, self._where] = new.transpose(0, 1)
        if self._slots is not None:
            queries = q.new_zeros(self._count * self._width, *q.shape[1:])
            q = queries.index_copy_(0, self._slots, q)
        q = q.reshape(self._count, self._width, *q.shape[1:])
        seen = self._first(layer, q) if self._is_first else self._later(layer, q)
        seen = seen.reshape(self._count * self._width, -1)
        return seen if self._slots is None else seen.index_select(0, self._slots)

    def _first(self, layer: int, q: Tensor) -> Tensor:
        """Attention without earlier tokens; returns `[R, width, heads, head width]`."""
        keys, values = (
            kept[layer][:, :, : self._width].transpose(0, 1)
            for kept in (self._suffix.keys, self._suffix.values)
        )
        return functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            is_causal=True,
            scale=self._decoder.scale,
            enable_gqa=self._decoder.heads != self._decoder.kv_heads,
        ).transpose(1, 2)

    def _build_attention_bias(self, columns: slice) -> Tensor:
        """Returns the bias of the scores, `[R, columns · rep, shared + stop]`."""
        unseen = self._unseen[:, columns]
        bias = self._decoder.template_tensor.new_zeros(unseen.shape).masked_fill_(
            unseen, -torch.inf
        )
        return bias.repeat_interleave(self._decoder.heads // self._decoder.kv_heads, dim=1)

    def _later(self, layer: int, q: Tensor) -> Tensor:
        """Attention with earlier tokens, in slices of new tokens; shaped like `_first`."""
        heads, found = self._decoder.kv_heads, []
        for at in range(0, self._width, self._slice):
            columns = slice(at, at + self._slice)
            scaled = (q[:, columns] * self._decoder.scale).unflatten(2, (heads, -1))
            queries = scaled.permute(2, 0, 1, 3, 4).reshape(heads, self._count, -1, q.shape[-1])
            bias = self._build_attention_bias(columns) if self._bias is None else self._bias
            seen = self._seen.attend(layer, queries, self._stop, bias)
            shape = heads, self._count, scaled.shape[1], -1, q.shape[-1]
            found.append(seen.view(shape).permute(1, 2, 0, 3, 4))
        return torch.cat(found, dim=1)


class StepAttention:
    """Attention of one new token per row, for consecutive decoding steps.

    Args:
        until: number of suffix columns that every step attends to, with future ones masked, so that
            all steps are the same operations on the same memory. By default, each step attends to
            the existing columns.

    Attributes:
        positions: `[R]` position of the token being read.
        longest: exclusive upper bound on the positions.
    """

    def __init__(
        self,
        decoder: PlainDecoder,
        levels: Sequence[tuple[AncestorLevel, list[int]]],
        suffix: RowSuffixes,
        read: list[int],
        until: int | None = None,
    ) -> None:
        device = decoder.template_tensor.device
        self._decoder = decoder
        self._seen = SharedContext(levels, suffix)
        self._suffix = suffix
        self._grows = until is None
        self._stop = suffix.longest if until is None else until
        self.positions = torch.tensor(read, device=device) - 1
        self.longest = max(read) if until is None else max(read) + until
        self._columns = None  # columns of the new tokens, if they differ between rows
        if len(set(suffix.lengths)) > 1 or until is not None:
            self._columns = torch.tensor(suffix.lengths, device=device) - 1
            suffix.blank(suffix.room if until is None else until)
        self._rows = torch.arange(len(read), device=device)
        # `[R, shared + room]`: 0 for tokens of the row, -inf elsewhere; None where all are seen.
        self._bias: Tensor | None = None
        if self._columns is not None or any(level.is_ragged for level, _ in levels):
            own = torch.tensor(suffix.lengths, device=device)[:, None]
            # Columns filled by all rows together need no mask: each is written before it is read.
            filled = (torch.arange(suffix.room, device=device) < own) | (self._columns is None)
            seen = torch.cat([*_build_ancestor_masks(levels, device), filled], dim=-1)
            bias = decoder.template_tensor.new_zeros(seen.shape)
            self._bias = bias.masked_fill_(~seen, -torch.inf)

    def advance(self) -> None:
        """Advances to the next token."""
        self.positions += 1
        self.longest += self._grows
        self._stop += self._grows
        if self._columns is not None and self._bias is not None:
            self._columns += 1
            # `bias[rows, columns] = 0` would copy a scalar to the device: no graph can record that.
            self._bias.scatter_(1, (self._seen.shared + self._columns)[:, None], 0.0)
        self._step_bias = None
        if self._bias is not None:
            self._step_bias = self._bias[:, None, : self._seen.shared + self._stop]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for kept, new in ((self._suffix.keys[layer], k), (self._suffix.values[layer], v)):
            if self._columns is None:
                kept[:, :, self._stop - 1] = new.transpose(0, 1)
            else:
                kept[:, self._rows, self._columns] = new.transpose(0, 1)
        queries = (q * self._decoder.scale).unflatten(1, (self._decoder.kv_heads, -1))
        queries = queries.transpose(0, 1).contiguous()
        seen = self._seen.attend(layer, queries, self._stop, self._step_bias)
        return seen.transpose(0, 1).reshape(len(q), -1)


def _build_ancestor_masks(
    levels: Sequence[tuple[AncestorLevel, list[int]]], device: torch.device
) -> list[Tensor]:
    """Returns for every level `[R, L]` bool: True where the row's ancestor has a token."""
    masks = []
    for level, at in levels:
        lengths = torch.tensor([level.lengths[place] for place in at], device=device)
        masks.append(torch.arange(level.keys.shape[-1], device=device) < lengths[:, None])
    return masks
