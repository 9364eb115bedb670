"""The bytes that each token of a vocabulary stands for."""

import json
import re
from typing import Any

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of SentencePiece for a single byte."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""


class TokenBytes:
    """The bytes of each token, also of one that holds part of a character.

    A character may be split over several tokens; decoded one by one, they give no text.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        self._kinds = _list_decoder_kinds(decoder)
        self._alphabet = _build_byte_alphabet() if "ByteLevel" in self._kinds else {}

    def __call__(self, token: int) -> bytes | None:
        """Returns the bytes of a token; None for a control token, which is no text."""
        if (added := self._added.get(token)) is not None:
            return None if added.special else added.content.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a model may have more tokens than its tokenizer
            return b""
        if self._alphabet:
            return bytes(self._alphabet[character] for character in piece)
        if "ByteFallback" in self._kinds:
            byte = BYTE_PIECE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode()
        return str(self._tokenizer.decode([token])).encode()


def _list_decoder_kinds(decoder: Any) -> set[str]:
    """Lists the kinds of the steps of a decoder of the library tokenizers."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {step["type"] for step in (state, *state.get("decoders", ()))}


def _build_byte_alphabet() -> dict[str, int]:
    """Builds the byte of every character of byte-level vocabularies: printable Latin-1 characters
    stand for themselves, and the rest for characters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + n) for n in range(len(others)))]
    return dict(zip(characters, (*printable, *others), strict=True))
