"""Sanitize untrusted text before it reaches a terminal, a log or a database."""

import re
import unicodedata

__all__ = ["escape_unprintable", "redact_passwords"]

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_BLANK = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    r"\U000e0100-\U000e01ef]"
)
"""Invisible characters of other categories: fillers, variation selectors, the blank braille cell.
"""


def escape_unprintable(text: str) -> str:
    """Returns `text` with control characters, direction marks and invisible characters escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape_character(c) for c in text)


def _escape_character(character: str) -> str:
    if character == "\t":
        return " "
    if unicodedata.category(character) in _HIDDEN or _BLANK.match(character):
        return character.encode("unicode_escape").decode("ascii")
    return character


def redact_passwords(text: str) -> str:
    """Replaces passwords in URLs by `***`.

    Example:
        >>> redact_passwords("postgresql://ann:s3cret@db/rlx")
        'postgresql://ann:***@db/rlx'
    """
    return re.sub(r"(://[^/\s:@]*):[^/\s@]+@", r"\1:***@", text)
