"""What a model's dialogue is asked, and what it gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Dialogue", "Shown"]


@dataclass(frozen=True, slots=True)
class Shown:
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

        A turn that did not close itself (out of budget, or a stop string) is closed first.
        """
        ...

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text of a turn without its end token, and the text's length after every token."""
        ...

    def observed(self, text: str, after: Sequence[int], *, inline: bool) -> Shown:
        """What follows the turn `after` where an environment says `text`, which is untrusted.

        Args:
            inline: the text alone, right behind the turn; else as `reply`.
        """
        ...
