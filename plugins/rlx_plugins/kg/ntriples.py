"""A strict parser for N-Triples 1.1 (https://www.w3.org/TR/n-triples/).

One regular expression covers the grammar of a line, so no RDF library is needed.
"""

import re
from typing import NamedTuple

_CODE = r"\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}"
_IRI = rf"<([A-Za-z][A-Za-z0-9+.-]*:(?:[^\x00-\x20<>\"{{}}|^`\\]|{_CODE})*)>"  # absolute only
_LETTERS = (
    "A-Za-z_\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02ff\u0370-\u037d\u037f-\u1fff\u200c-\u200d"
    "\u2070-\u218f\u2c00-\u2fef\u3001-\ud7ff\uf900-\ufdcf\ufdf0-\ufffd\U00010000-\U000effff"
)
_MORE = f"{_LETTERS}0-9\u00b7\u0300-\u036f\u203f-\u2040-"
_BLANK = f"(_:[{_LETTERS}0-9](?:[{_MORE}.]*[{_MORE}])?)"
_LITERAL = rf'"((?:[^"\\\n\r]|\\[tbnrf"\'\\]|{_CODE})*)"'
_TAG = rf"(?:@([A-Za-z]+(?:-[A-Za-z0-9]+)*)|\^\^[ \t]*{_IRI})?"
_STATEMENT = re.compile(
    rf"[ \t]*(?:{_IRI}|{_BLANK})[ \t]*{_IRI}[ \t]*"
    rf"(?:{_IRI}|{_BLANK}|{_LITERAL}[ \t]*{_TAG})[ \t]*\.[ \t]*(?:#[^\r\n]*)?"
)
_ESCAPE = re.compile(rf"\\[tbnrf\"'\\]|{_CODE}")
_CONTROLS = dict(zip("tbnrf", "\t\b\n\r\f", strict=True))


class RdfLiteral(NamedTuple):
    """A literal as the object of a statement; language and datatype are "" if absent."""

    text: str
    language: str
    datatype: str


Statement = tuple[str, str, str | RdfLiteral]
"""Subject, predicate and object: IRIs, or blank nodes such as `_:b0`, or a literal as object."""


def parse_statement(line: str) -> Statement | None:
    """Parses and unescapes the statement of a line; None for an empty line or a comment.

    Raises:
        ValueError: the line is not a statement.
    """
    line = line.rstrip("\r\n")
    content = line.lstrip(" \t")
    if not content or content.startswith("#"):
        return None
    found = _STATEMENT.fullmatch(line)
    if found is None:
        raise ValueError("expected a statement of N-Triples: subject, predicate, object and .")
    iri, blank, predicate, object_iri, object_blank, text, language, datatype = found.groups()
    object_: str | RdfLiteral
    if text is not None:
        language = (language or "").lower()  # language tags are case-insensitive
        object_ = RdfLiteral(_unescape_text(text), language, _unescape_text(datatype or ""))
    else:
        object_ = object_blank or _unescape_text(object_iri)
    return blank or _unescape_text(iri), _unescape_text(predicate), object_


def _unescape_text(text: str) -> str:
    return _ESCAPE.sub(_decode_escape, text) if "\\" in text else text


def _decode_escape(found: re.Match[str]) -> str:
    letter, digits = found[0][1], found[0][2:]
    if not digits:
        return _CONTROLS.get(letter, letter)
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{found[0]} is not a character")
    return chr(code)
