"""Batches of dialogues that are decoded together, and those that share prefixes."""

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from rlx.sampler.gpu_steps import CapturedSteps
from rlx.sampler.plain_decoder import PlainDecoder
from rlx.sampler.shared_attention import (
    AncestorLevel,
    PrefillAttention,
    RowSuffixes,
    StepAttention,
    join_levels,
)

COMPACT_BELOW = 0.75
"""Finished rows are dropped once the fraction of running rows is below this."""

COMPACT_CAPTURED_BELOW = 0.5
"""The same where steps are captured: each smaller batch costs a capture."""


class DialogueRows(Protocol):
    """`R` dialogues with their KV caches.

    `room` is the number of tokens that are likely to be read next; caches reserve space for them.

    Attributes:
        compact_below: fraction of running rows below which it pays to drop the others.
    """

    compact_below: float

    def prefill(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        """Reads one or more tokens in every dialogue; returns `[R, V]` logits of the next token."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one token per dialogue, `[R]`; returns `[R, V]` logits of the next token."""
        ...

    def fork(self, copies: Sequence[int], room: int) -> Self:
        """Returns dialogues that continue the given rows; a row may be repeated."""
        ...

    def select(self, rows: Sequence[int], room: int) -> Self:
        """Returns only the given rows."""
        ...

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        """Returns the given rows, each without its last `excess` tokens."""
        ...

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        """Joins rows of several batches, in order; all must have been forked equally often."""
        ...


class Decoder(Protocol):
    """Computes a model; its description says how, for the run's record."""

    description: str

    def start(self, rows: int) -> DialogueRows:
        """Returns empty dialogues."""
        ...


class SharingDecoder:
    """A plain decoder whose rows share ancestors; `why_not` tells why steps cannot be captured."""

    def __init__(
        self,
        decoder: PlainDecoder,
        captures: bool = False,
        why_not: str | None = None,
    ) -> None:
        self._decoder, self._captures = decoder, captures and why_not is None
        steps = f", steps not captured: {why_not}" if why_not else ", captured steps" * captures
        self.description = f"compact decoder, shared ancestors{steps}"

    def start(self, rows: int) -> "SharedRows":
        d = self._decoder
        empty = d.template_tensor.new_empty(d.layers, d.kv_heads, rows, 0, d.width)
        suffixes = RowSuffixes(empty, empty, [0] * rows)
        return SharedRows(d, [], suffixes, captures=self._captures)


class SharedRows:
    """See `rlx.sampler.rows.DialogueRows`."""

    def __init__(
        self,
        decoder: PlainDecoder,
        levels: list[tuple[AncestorLevel, list[int]]],
        suffix: RowSuffixes,
        *,
        captures: bool,
    ) -> None:
        self._decoder, self._captures = decoder, captures
        self.compact_below = COMPACT_CAPTURED_BELOW if captures else COMPACT_BELOW
        self._levels = levels  # each with the index of every row's ancestor
        self._suffix = suffix
        self._attention: StepAttention | None = None
        self._captured: CapturedSteps | None = None

    def __len__(self) -> int:
        return len(self._suffix.lengths)

    @property
    def _lengths(self) -> list[int]:
        """Tokens read so far per row, ancestors included."""
        read = list(self._suffix.lengths)
        for level, places in self._levels:
            read = [n + level.lengths[place] for n, place in zip(read, places, strict=True)]
        return read

    def prefill(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        width = max(map(len, fresh))
        self._make_room(width, room)
        suffix = self._suffix
        suffix.blank(suffix.longest + width)
        attention = PrefillAttention(self._decoder, self._levels, suffix, [len(f) for f in fresh])
        device = self._decoder.template_tensor.device
        before = torch.tensor(self._lengths, device=device)
        hidden = self._decoder.compute_hidden_states(
            torch.tensor([token for row in fresh for token in row], device=device),
            before[attention.rows] + attention.columns,
            max(self._lengths) + width,
            attention,
        )
        ends = torch.tensor([len(f) for f in fresh], device=device).cumsum(0) - 1
        lengths = [n + len(f) for n, f in zip(suffix.lengths, fresh, strict=True)]
        self._suffix = RowSuffixes(suffix.keys, suffix.values, lengths)
        self._attention = self._captured = None
        return self._decoder.logits(hidden[ends])

    def step(self, tokens: Tensor) -> Tensor:
        self._make_room(1, self._suffix.longest)
        suffix, parts = self._suffix, (self._decoder, self._levels, self._suffix)
        if self._captures:
            if self._captured is None or self._captured.until == suffix.longest:
                self._captured = CapturedSteps(*parts, self._lengths)
            logits = self._captured.step(tokens)
        else:
            attention = self._attention = self._attention or StepAttention(*parts, self._lengths)
            attention.advance()
            hidden = self._decoder.compute_hidden_states(
                tokens, attention.positions, attention.longest, attention
            )
            logits = self._decoder.logits(hidden)
        self._suffix = RowSuffixes(suffix.keys, suffix.values, [n + 1 for n in suffix.lengths])
        return logits

    def _make_room(self, needed: int, more: int) -> None:
        """Reallocates the suffix with room for `needed + more` columns if `needed` do not fit."""
        suffix = self._suffix
        if suffix.room < suffix.longest + needed:
            everything = [(suffix, row) for row in range(len(self))]
            self._suffix = RowSuffixes.gather_rows(everything, suffix.lengths, needed + more)
            self._attention = self._captured = None

    def fork(self, copies: Sequence[int], room: int) -> Self:
        suffix, longest = self._suffix, self._suffix.longest
        keys = suffix.keys[:, :, :, :longest].mT.contiguous()
        level = AncestorLevel(keys, suffix.values[:, :, :, :longest].contiguous(), suffix.lengths)
        levels = [(above, [places[c] for c in copies]) for above, places in self._levels]
        layers, heads, _, _, width = suffix.keys.shape
        shape = layers, heads, len(copies), room, width
        keys, values = (suffix.keys.new_empty(shape) for _ in range(2))
        new = RowSuffixes(keys, values, [0] * len(copies))
        levels.append((level, list(copies)))
        return self._rebuild(levels, new)

    def select(self, rows: Sequence[int], room: int) -> Self:
        return type(self).join_rows([(self, row) for row in rows], room)

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        suffix = self._suffix
        lengths = [suffix.lengths[r] - n for r, n in zip(rows, excess, strict=True)]
        kept = RowSuffixes.gather_rows([(suffix, row) for row in rows], lengths, 0)
        levels = [(level, [places[row] for row in rows]) for level, places in self._levels]
        return self._rebuild(levels, kept)

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        lengths = [rows._suffix.lengths[row] for rows, row in places]
        suffix = RowSuffixes.gather_rows(
            [(rows._suffix, row) for rows, row in places], lengths, room
        )
        first = places[0][0]
        levels = []
        for depth in range(len(first._levels)):
            ancestors = [rows._levels[depth] for rows, _ in places]
            levels.append(
                join_levels(
                    [(lv, at[row]) for (lv, at), (_, row) in zip(ancestors, places, strict=True)]
                )
            )
        return first._rebuild(levels, suffix)

    def _rebuild(self, levels: list[tuple[AncestorLevel, list[int]]], suffix: RowSuffixes) -> Self:
        return type(self)(self._decoder, levels, suffix, captures=self._captures)
