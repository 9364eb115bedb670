"""KV cache of dialogues: ancestors that rows share, and a suffix per row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["AncestorLevel", "RowSuffixes", "join_levels"]


@dataclass(frozen=True, slots=True, eq=False)
class AncestorLevel:
    """Ancestors of one depth.

    Attributes:
        keys: `[layers, kv_heads, N, width, L]`; the layout in memory is the decoder's choice.
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
    """Keys and values of each row's own tokens, `[layers, kv_heads, R, room, width]`.

    `lengths` holds the tokens of each row. Columns beyond the longest row are uninitialized.
    """

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
