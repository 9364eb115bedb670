"""What a model's dialogue is asked, and what it gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "Dialogue",
    "Pieces",
    "TokenReader",
    "TurnPrompt",
    "build_piece_splitter",
    "encode_between_turns",
]

Pieces = Callable[[Sequence[int]], Sequence[str]]
"""The text of each token of a stretch."""


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """What a model is shown before a turn.

    Attributes:
        text: of an environment, without anything that the tokenizer would take for a control token.
        token_ids: of all that stands between one turn and the next.
    """

    text: str
    token_ids: tuple[int, ...]


class Dialogue(Protocol):
    """Text to tokens and back, the model's own way. Sampled tokens are never re-tokenised."""

    def open(self, text: str, system: str = "") -> tuple[int, ...]:
        """Tokens that show a system message, if any, and `text`, and hand over the first turn."""
        ...

    def reply(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        """Tokens that follow the turn `after`, show `text`, and hand over the next.

        A turn that did not close itself (out of budget, or a stop string) is closed first. Where
        a schedule has nothing to show, the next turn goes on where `after` stopped: see `between`.
        """
        ...

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text of a turn without its end token, and the text's length after every token."""
        ...

    def encode_observation(self, text: str, after: Sequence[int], *, inline: bool) -> TurnPrompt:
        """What follows the turn `after` where an environment says `text`, which is untrusted.

        Args:
            inline: the text alone, right behind the turn; else as `reply`.
        """
        ...


class _ReplyingDialogue(Protocol):
    def reply(self, text: str, after: Sequence[int]) -> tuple[int, ...]: ...


def encode_between_turns(
    dialogue: _ReplyingDialogue, text: str, after: Sequence[int]
) -> tuple[int, ...]:
    """What stands between the turn `after` and one that is asked for with `text`.

    Without a text there is nothing at all: the next turn goes on in the same message, behind the
    stop string. Several of them then fork out of one sequence.
    """
    return dialogue.reply(text, after) if text else ()


class TokenReader(Protocol):
    """A dialogue that can also say what single tokens are."""

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """See `Dialogue`."""
        ...

    def piece(self, token: int) -> str:
        """What a token decodes to on its own, special tokens by their names."""
        ...


def build_piece_splitter(speech: TokenReader | None) -> Pieces:
    """The texts of tokens as a dialogue reads them; their ids where there is none.

    A character belongs to the token that completes it; a token that adds nothing (it ends a turn,
    or is one byte of several) is shown as what it is on its own.
    """
    if speech is None:
        return lambda ids: [f"#{token}" for token in ids]

    def split_pieces(ids: Sequence[int]) -> list[str]:
        text, ends = speech.read(ids)
        parts = [text[a:b] for a, b in zip((0, *ends), ends, strict=False)]
        return [part or speech.piece(token) for part, token in zip(parts, ids, strict=True)]

    return split_pieces
