"""Dialogues being continued together, whatever computes them."""

from collections.abc import Sequence
from typing import Protocol, Self

from torch import Tensor

__all__ = ["CompletionRows", "Decoder", "DialogueRows"]


class DialogueRows(Protocol):
    """`R` dialogues, with what a model keeps of the tokens that it has read of each.

    `room` is how many tokens are likely to be read next: what is kept grows into it.
    """

    def read(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        """Reads on in every dialogue, one token or more; `[R, V]` logits of what follows."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one token in every dialogue, `[R]`; `[R, V]` logits of what follows."""
        ...

    def fork(self, copies: Sequence[int], room: int) -> Self:
        """Dialogues that go on from the named rows, any number from each."""
        ...

    def select(self, rows: Sequence[int], room: int) -> Self:
        """The named rows alone."""
        ...

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        """The named rows, each without its last `excess` tokens."""
        ...

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        """Rows taken from several batches that were forked equally often, in the order named."""
        ...


class Decoder(Protocol):
    """A way to compute a model.

    Attributes:
        description: what it is, for the record.
    """

    description: str

    def start(self, rows: int) -> DialogueRows:
        """Dialogues of which nothing has been read."""
        ...


class CompletionRows:
    """What is kept of completions, found again by the completion's number."""

    def __init__(self) -> None:
        self._places: list[tuple[DialogueRows, int]] = []
        self._read: list[int] = []

    def add(self, places: Sequence[tuple[DialogueRows, int]], read: Sequence[int]) -> None:
        """Remembers where each of the next completions is, and how many tokens were read of it."""
        self._places += places
        self._read += read

    def read(self, numbers: Sequence[int]) -> list[int]:
        """How many tokens of the numbered completions have been read, context and all."""
        return [self._read[number] for number in numbers]

    def take(self, numbers: Sequence[int], room: int) -> DialogueRows:
        """Rows that go on from the numbered completions."""
        places = [self._places[number] for number in numbers]
        return type(places[0][0]).join_rows(places, room)
