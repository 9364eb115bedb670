"""Protocols for decoding a batch of dialogues, independent of the decoder."""

from collections.abc import Collection, Sequence
from typing import Protocol, Self

from torch import Tensor

__all__ = ["COMPACT_BELOW", "COMPACT_CAPTURED_BELOW", "CompletionRows", "Decoder", "DialogueRows"]

COMPACT_BELOW = 0.75
"""Finished rows are dropped once the fraction of running rows is below this."""
COMPACT_CAPTURED_BELOW = 0.5
"""The same where steps are captured: each smaller batch costs a capture, which takes longer than a
few finished rows in a step whose time hardly depends on its rows."""


class DialogueRows(Protocol):
    """`R` dialogues with their KV caches.

    `room` is the number of tokens that are likely to be read next; caches reserve space for them.

    Attributes:
        compact_below: fraction of running rows below which it pays to drop the others.
    """

    compact_below: float

    def read(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
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
    """Computes a model.

    Attributes:
        name: what it is, for messages.
        description: how it computes, for the run's record.
    """

    name: str
    description: str

    def start(self, rows: int) -> DialogueRows:
        """Returns empty dialogues."""
        ...


class CompletionRows:
    """KV caches of finished completions, by completion number."""

    def __init__(self) -> None:
        self._places: list[tuple[DialogueRows, int] | None] = []
        self._read: list[int] = []

    def add(self, places: Sequence[tuple[DialogueRows, int]], read: Sequence[int]) -> None:
        """Stores the batch and row of each of the next completions, and its tokens read so far."""
        self._places += places
        self._read += read

    def retain(self, numbers: Collection[int]) -> None:
        """Drops all completions but these, in order to free their memory."""
        for number in {*range(len(self._places))} - {*numbers}:
            self._places[number] = None

    def read(self, numbers: Sequence[int]) -> list[int]:
        """Returns the number of tokens read of each completion, context included."""
        return [self._read[number] for number in numbers]

    def take(self, numbers: Sequence[int], room: int) -> DialogueRows:
        """Returns rows that continue the given completions."""
        places = [place for number in numbers if (place := self._places[number]) is not None]
        assert len(places) == len(numbers), "a dropped completion is continued"
        return type(places[0][0]).join_rows(places, room)
