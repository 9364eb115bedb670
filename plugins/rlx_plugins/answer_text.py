"""Compares answers as text: the normal form of answers and names, and numbers as numbers.

A data file may hold a number as a JSON or Parquet float: 72 becomes 72.0 in a column with a null,
and 0.00001 becomes 1e-05. `format_number` writes it as a person would, and `parse_number` reads
what a model wrote, so that both are compared as numbers.
"""

import re
import string
import unicodedata
from decimal import Decimal

_TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("’‘ʼ´`′", "'"),
        **dict.fromkeys("“”„«»″", '"'),
        **dict.fromkeys("−‐‑‒–—", "-"),
        "⁄": "/",
    }
)
"""Characters that a model or a file may write for one of ASCII."""

_articles = re.compile(r"\b(?:a|an|the)\b(?=\s+\S)")
_thousands = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_number = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_short_word = re.compile(r"(?<!\w)\w{1,2}$")


def normalize_answer(text: str) -> str:
    """Returns the normal form in which answers and names are compared.

    As in question answering (SQuAD, HotpotQA), it ignores case, punctuation, white space between
    words, and an article before a word. What belongs to a number stays: a sign, a decimal point, a
    slash, a percent sign, and any mark between digits; commas between thousands go. So does what
    belongs to a short name: `C++`, `C#`, `A-`. A text of marks alone is its own normal form.
    """
    folded = unicodedata.normalize("NFC", text.translate(_TYPOGRAPHY).casefold())
    joined = _thousands.sub("", folded)
    kept = "".join(
        c for i, c in enumerate(joined) if not _is_punctuation(c) or _belongs_to_word(joined, i)
    )
    return " ".join(_articles.sub(" ", kept).split()) or " ".join(folded.split())


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character)[0] == "P"


def _belongs_to_word(text: str, at: int) -> bool:
    """Whether a mark is part of the number or the short name that it touches."""
    mark, before, after = text[at], text[at - 1 : at], text[at + 1 : at + 2]
    if before.isdecimal() and after.isdecimal():
        return mark not in "'\""
    if mark in "+-." and after.isdecimal():
        return not before.isalnum()
    if mark == "+" or mark == "#":
        return before.isalnum() or before == "+"
    if mark == "-":
        return not after.isalnum() and bool(_short_word.search(text[max(0, at - 3) : at]))
    return (mark in "*^=<>/" and (before + after).strip(" ").isdecimal()) or (
        mark == "%" and before.isdecimal()
    )


def format_number(value: float) -> str:
    """Returns a number in decimal digits, without exponent and without zeros at the end.

    Raises:
        ValueError: the number is infinite or not a number.
    """
    if isinstance(value, int):
        return str(value)
    written = format(Decimal(repr(value)), "f")  # raises for infinities below
    if not any(map(str.isdigit, written)):
        raise ValueError(f"{value} is not a finite number")
    if "." in written:
        written = written.rstrip("0").rstrip(".")
    return "0" if written == "-0" else written


def parse_number(text: str) -> Decimal | None:
    """Returns the number that a text is as a whole; None for any other text."""
    plain = _thousands.sub("", text.translate(_TYPOGRAPHY).strip())
    return Decimal(plain) if _number.fullmatch(plain) else None
