"""Dialogues with shared prefixes.

The KV cache of a dialogue is a chain: ancestors shared with other dialogues, and its own suffix.
Every ancestor is stored once. In a step, the queries of all rows below an ancestor attend to it in
one matrix product. A fork copies only the suffix that becomes an ancestor.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from rlx.sampler.gpu_steps import CapturedSteps
from rlx.sampler.plain_decoder import PlainDecoder
from rlx.sampler.rows import COMPACT_BELOW, COMPACT_CAPTURED_BELOW
from rlx.sampler.shared_attention import (
    AncestorLevel,
    PrefillAttention,
    RowSuffixes,
    StepAttention,
    join_levels,
)

__all__ = ["SharedRows", "SharingDecoder"]


class SharingDecoder:
    """A plain decoder whose rows share ancestors.

    Args:
        decoder: computes the model.
        captures: use `CapturedSteps` for decoding steps.
        why_not: why steps cannot be captured; None if they can.
        flash: use `FlashStepAttention` for captured steps.
        no_flash: why it cannot be used although this GPU has it; None otherwise.
    """

    def __init__(
        self,
        decoder: PlainDecoder,
        captures: bool = False,
        why_not: str | None = None,
        *,
        flash: bool = False,
        no_flash: str | None = None,
    ) -> None:
        self.name = "the plain decoder"
        self._decoder, self._captures = decoder, captures and why_not is None
        self._flash = flash and self._captures
        steps = f", steps not captured: {why_not}" if why_not else ", captured steps" * captures
        attention = " with flash attention" * self._flash
        attention += f", no flash attention: {no_flash}" if no_flash else ""
        self.description = f"compact decoder, shared ancestors{steps}{attention}"

    def start(self, rows: int) -> "SharedRows":
        """See `rlx.sampler.rows.Decoder`."""
        d = self._decoder
        empty = d.template_tensor.new_empty(d.layers, d.kv_heads, rows, 0, d.width)
        suffixes = RowSuffixes(empty, empty, [0] * rows)
        return SharedRows(d, [], suffixes, captures=self._captures, flash=self._flash)


class SharedRows:
    """See `rlx.sampler.rows.DialogueRows`."""

    def __init__(
        self,
        decoder: PlainDecoder,
        levels: list[tuple[AncestorLevel, list[int]]],
        suffix: RowSuffixes,
        *,
        captures: bool,
        flash: bool,
    ) -> None:
        self._decoder, self._captures, self._flash = decoder, captures, flash
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

    def read(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        """See `DialogueRows`."""
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
        """See `DialogueRows`."""
        self._make_room(1, self._suffix.longest)
        logits = self._captured_step(tokens) if self._captures else self._plain_step(tokens)
        suffix = self._suffix
        self._suffix = RowSuffixes(suffix.keys, suffix.values, [n + 1 for n in suffix.lengths])
        return logits

    def _plain_step(self, tokens: Tensor) -> Tensor:
        if self._attention is None:
            self._attention = StepAttention(
                self._decoder, self._levels, self._suffix, self._lengths
            )
        attention = self._attention
        attention.advance()
        hidden = self._decoder.compute_hidden_states(
            tokens, attention.positions, attention.longest, attention
        )
        return self._decoder.logits(hidden)

    def _captured_step(self, tokens: Tensor) -> Tensor:
        if self._captured is None or self._captured.until == self._suffix.longest:
            self._captured = CapturedSteps(
                self._decoder, self._levels, self._suffix, self._lengths, flash=self._flash
            )
        return self._captured.step(tokens)

    def _make_room(self, needed: int, more: int) -> None:
        """Reallocates the suffix with room for `needed + more` columns if `needed` do not fit."""
        suffix = self._suffix
        if suffix.room < suffix.longest + needed:
            everything = [(suffix, row) for row in range(len(self))]
            self._suffix = RowSuffixes.gather_rows(everything, suffix.lengths, needed + more)
            self._attention = self._captured = None

    def fork(self, copies: Sequence[int], room: int) -> Self:
        """See `DialogueRows`."""
        suffix, longest = self._suffix, self._suffix.longest
        keys = suffix.keys[:, :, :, :longest]
        # The layout in memory that attention reads fastest: flash attention's, or that of products.
        keys = keys.contiguous().mT if self._flash else keys.mT.contiguous()
        level = AncestorLevel(keys, suffix.values[:, :, :, :longest].contiguous(), suffix.lengths)
        levels = [(above, [places[c] for c in copies]) for above, places in self._levels]
        layers, heads, _, _, width = suffix.keys.shape
        shape = layers, heads, len(copies), room, width
        keys, values = (suffix.keys.new_empty(shape) for _ in range(2))
        new = RowSuffixes(keys, values, [0] * len(copies))
        levels.append((level, list(copies)))
        return self._rebuild(levels, new)

    def select(self, rows: Sequence[int], room: int) -> Self:
        """See `DialogueRows`."""
        return type(self).join_rows([(self, row) for row in rows], room)

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        """See `DialogueRows`."""
        suffix = self._suffix
        lengths = [suffix.lengths[r] - n for r, n in zip(rows, excess, strict=True)]
        kept = RowSuffixes.gather_rows([(suffix, row) for row in rows], lengths, 0)
        levels = [(level, [places[row] for row in rows]) for level, places in self._levels]
        return self._rebuild(levels, kept)

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        """See `DialogueRows`."""
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
        """The same decoder with other dialogues."""
        return type(self)(self._decoder, levels, suffix, captures=self._captures, flash=self._flash)
