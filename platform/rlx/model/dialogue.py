"""Text to tokens and back, for plain models and for models with a chat template."""

from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from rlx.errors import SpecError

__all__ = ["PlainDialogue"]


class PlainDialogue:
    """Turns follow one another as plain text; a turn ends with the end-of-sequence token.

    Args:
        tokenizer: the model's.
        end_ids: tokens that end a turn; the first closes turns that did not end by themselves.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.end_ids = tuple(end_ids)

    def open(self, text: str, system: str = "") -> tuple[int, ...]:
        """Beginning-of-sequence token where the model has one, the system message, the text."""
        begin = self._tokenizer.bos_token_id
        shown = f"{system}\n\n{text}" if system else text
        return (*(() if begin is None else (begin,)), *self.encode(shown))

    def reply(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        """The text; an end token first where the turn has none."""
        closed = bool(after) and after[-1] in self.end_ids
        return (*(() if closed else self.end_ids[:1]), *self.encode(text))

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text without the end token, and the number of characters decoded after every token."""
        spoken = list(token_ids)
        if spoken and spoken[-1] in self.end_ids:
            spoken.pop()
        text = self._decode(spoken)
        ends = self._ends(spoken, text)
        return text, (*ends, *[len(text)] * (len(token_ids) - len(spoken)))

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of `text`, nothing added.

        Raises:
            SpecError: the vocabulary has no token for some of it.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and unknown in ids:
            raise SpecError(f"the tokenizer of this model has no token for a part of {text!r}")
        return tuple(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _ends(self, ids: Sequence[int], text: str) -> list[int]:
        """Lengths of the decoded prefixes.

        Where every token decodes on its own to its share of the text, lengths add up; otherwise
        (bytes of one character in several tokens, merged spaces) each prefix is decoded, and a
        character counts from the token that completes it.
        """
        pieces = [self._pieces[i] for i in ids]
        if "".join(pieces) == text:
            lengths, total = [], 0
            for piece in pieces:
                lengths.append(total := total + len(piece))
            return lengths
        return [
            len(self._decode(ids[: n + 1]).rstrip("\N{REPLACEMENT CHARACTER}"))
            for n in range(len(ids))
        ]

    @cached_property
    def _pieces(self) -> list[str]:
        return [self._decode([i]) for i in range(len(self._tokenizer))]
