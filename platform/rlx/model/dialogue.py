"""Text to tokens and back, for plain models and for models with a chat template."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlx.errors import SpecError
from rlx.rollout import TurnPrompt

__all__ = ["ChatDialogue", "ModelDialogue", "PlainDialogue"]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character decode to as long as some of them are missing."""


class _DialogueBase(ABC):
    """What every dialogue shares: tokens of a text, and text of a turn's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        named = tokenizer.added_tokens_decoder.values()
        self._control = [token.content for token in named if token.special]
        self.end_ids = tuple(end_ids)

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text without the end token, and the number of characters decoded after every token."""
        spoken = list(token_ids)
        if self._is_closed(spoken):
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
        # Vocabularies of bytes know everything, and often name the end token here.
        if unknown is not None and unknown in ids and unknown not in self.end_ids:
            raise SpecError(
                f"the tokenizer of this model has no token for {self._piece_at(text, unknown)!r} "
                f"in {text!r}: let the task's options give text that it can write, or take another "
                "model"
            )
        return tuple(ids)

    def encode_observation(self, text: str, after: Sequence[int], *, inline: bool) -> TurnPrompt:
        """See `rlx.rollout.Dialogue`. Names of control tokens are broken up by a blank."""
        for token in self._control:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return TurnPrompt(text, self.encode(text) if inline else self.reply(text, after))

    @abstractmethod
    def reply(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        """See `rlx.rollout.Dialogue`."""

    def piece(self, token: int) -> str:
        """What a token decodes to on its own, special tokens by their names."""
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def _piece_at(self, text: str, token: int) -> str:
        """The part of a text that a token stands for, the first time it does."""
        said = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start, stop = said["offset_mapping"][said["input_ids"].index(token)]
        return text[start:stop]

    def _is_closed(self, turn: Sequence[int]) -> bool:
        return bool(turn) and turn[-1] in self.end_ids

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _ends(self, ids: Sequence[int], text: str) -> list[int]:
        """Lengths of the decoded prefixes.

        Where every token decodes on its own to its share of the text, lengths add up. Otherwise
        (bytes of one character in several tokens, spaces that depend on what stands before) tokens
        are decoded behind the tokens before them, and a character counts from the token that
        completes it.
        """
        pieces = [self.piece(i) for i in ids]
        if "".join(pieces) == text:
            return list(accumulate(map(len, pieces)))
        lengths, total = [], 0
        before = start = 0  # ids[before:start] are whole characters, ids[start:] may not be
        for stop in range(1, len(ids) + 1):
            known = len(self._decode(ids[before:start]))
            fresh = self._decode(ids[before:stop])[known:]
            whole = fresh.rstrip(INCOMPLETE)
            lengths.append(total + len(whole))
            if whole == fresh:
                total += len(whole)
                before, start = start, stop
        return lengths


class PlainDialogue(_DialogueBase):
    """Turns follow one another as plain text; a turn ends with the end-of-sequence token.

    Args:
        tokenizer: the model's.
        end_ids: tokens that end a turn; the first closes turns that did not end by themselves.
    """

    def open(self, text: str, system: str = "") -> tuple[int, ...]:
        """Beginning-of-sequence token where the model has one, the system message, the text."""
        begin = self._tokenizer.bos_token_id
        return (
            *(() if begin is None else (begin,)),
            *self.encode(_prepend_system_message(text, system)),
        )

    def reply(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        """The text; an end token first where the turn has none."""
        return (*(() if self._is_closed(after) else self.end_ids[:1]), *self.encode(text))


class ChatDialogue(_DialogueBase):
    """Turns wear the tokenizer's chat template.

    The template renders what stands around the sampled turns and never the turns themselves: what
    follows a turn is what the template writes behind a placeholder in the turn's place.

    Args:
        tokenizer: the model's, with a chat template.
        end_ids: tokens that end a turn, besides the template's own, which comes first.

    Raises:
        SpecError: the template cannot be used in this way.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> None:
        super().__init__(tokenizer, end_ids)
        self._takes_system = self._accepts_system_message()
        self._closing = self._closing_ids()
        self.end_ids = tuple(dict.fromkeys((*self._closing[-1:], *end_ids)))

    def open(self, text: str, system: str = "") -> tuple[int, ...]:
        """System message, text and the header of the first turn, as the template writes them."""
        if not system or self._takes_system:
            messages = [_build_message("system", system)] if system else []
            return self.encode(self._render([*messages, _build_message("user", text)]))
        return self.encode(
            self._render([_build_message("user", _prepend_system_message(text, system))])
        )

    def reply(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        """What closes the turn `after`, the text, and the header of the next turn.

        Nothing that the turn ended with is said again; a turn that did not close itself is closed
        as the template does it, or with the first end token where the template does nothing.
        """
        ids = self.encode(self._render_turn_suffix(text))
        if self._is_closed(after):
            return ids[len(self._closing) or int(ids[:1] == tuple(after[-1:])) :]
        closes = self._closing or self._is_closed(ids[:1])
        return ids if closes else (*self.end_ids[:1], *ids)

    def _closing_ids(self) -> tuple[int, ...]:
        """Tokens with which the template ends a turn, up to its end token; empty without one.

        They are what the last turn of a dialogue and one in its middle have in common: blanks, if
        any, and a token that stands for no text.
        """
        last, middle = (self.encode(self._render_turn_suffix(text)) for text in (None, "?"))
        special = self._tokenizer.added_tokens_decoder
        for n, (token, other) in enumerate(zip(last, middle, strict=False)):
            if token == other and token in special:
                return last[: n + 1]
            if token != other or self.piece(token).strip():
                break
        return ()

    def _accepts_system_message(self) -> bool:
        """Whether the template takes system messages; some refuse them, some drop them."""
        word = _build_placeholder("")
        try:
            return word in self._render(
                [_build_message("system", word), _build_message("user", "?")]
            )
        except SpecError:
            return False

    def _render_turn_suffix(self, text: str | None) -> str:
        """What the template writes behind a turn that `text` answers, or that nothing does."""
        turn = _build_placeholder(text or "")
        messages = [_build_message("user", "?"), _build_message("assistant", turn)]
        if text is not None:
            messages.append(_build_message("user", text))
        parts = self._render(messages, prompt=text is not None).split(turn)
        if len(parts) != 2:
            raise SpecError(
                "the model's chat template does not show a turn as it was spoken, so rlx cannot "
                "tell what follows one; model.chat_template: false speaks as plain text"
            )
        return parts[1]

    def _render(self, messages: list[dict[str, str]], *, prompt: bool = True) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt
                )
            )
        except (TemplateError, ValueError) as error:
            raise SpecError(
                f"the model's chat template cannot be used ({error}); "
                "model.chat_template: false speaks as plain text"
            ) from error


ModelDialogue = PlainDialogue | ChatDialogue
"""How a model holds a dialogue; see `rlx.rollout.Dialogue`."""


def _build_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _prepend_system_message(text: str, system: str) -> str:
    return f"{system}\n\n{text}" if system else text


def _build_placeholder(text: str) -> str:
    """A word that no template changes and that `text` does not hold."""
    word = "rlxturn"
    while word in text:
        word += "n"
    return word
