"""Compares answers as text: the normal form of answers and names, and numbers as numbers."""

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
_WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
"""Full-width forms of ASCII, which East Asian texts have."""

_articles = re.compile(r"\b(?:a|an|the)\b(?=\s+\S)")
_thousands = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_groups = re.compile(r"(?<=\d)[ \u00a0\u2009\u202f](?=\d{3}(?!\d))")
_spaced_mark = re.compile(
    r"(?<=\d) *(/) *(?=\d)|(?<=\d)(,) (?=\d)|(?<=\d) (%)| *([<>]) *(?=[-+.]?\d)|(?<=\d) *([<>]) *"
)
"""A mark that belongs to a number, and spaces around it that mean nothing."""
_plain_number = re.compile(r"[+-]?(?:0|[1-9]\d*|(?=\.))(?:\.\d*)?", re.ASCII)
_number = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_short_word = re.compile(r"(?<!\w)\w{1,2}$")


def normalize_answer(text: str) -> str:
    """Returns the normal form in which answers and names are compared.

    As in question answering (SQuAD, HotpotQA), it ignores case, punctuation, white space between
    words, and an article before a word. What belongs to a number stays: a sign, a decimal point, a
    slash, a percent sign, a comparison, and any mark between digits; commas between thousands go. A
    text that is a number as a whole is that number: `.50` is `0.5`. What belongs to a short name
    stays too: `C++`, `C#`, `A-`. A text of marks alone is its own normal form.
    """
    plain = unicodedata.normalize("NFC", _write_plainly(text).casefold())
    folded = "".join(c for c in plain if unicodedata.category(c) != "Cf")
    number = _thousands.sub("", folded.strip().rstrip(".")) or folded
    if _plain_number.fullmatch(number) and any(map(str.isdecimal, number)):
        return _write_number(number)
    joined = _spaced_mark.sub(r"\1\2\3\4\5", _thousands.sub("", folded))
    kept = "".join(
        c
        for i, c in enumerate(joined)
        if not (c in string.punctuation or unicodedata.category(c)[0] == "P")
        or _belongs_to_word(joined, i)
    )
    return " ".join(_articles.sub(" ", kept).split()) or " ".join(folded.split())


def _write_number(number: str) -> str:
    """A plain number without the zeros and the sign that it does not need."""
    whole, _, part = number.lstrip("+-").partition(".")
    digits = ".".join(filter(None, (whole or "0", part.rstrip("0"))))
    return f"-{digits}" if number[0] == "-" and digits != "0" else digits


def _write_plainly(text: str) -> str:
    """A text with ASCII in place of what typography has for it: `½` is ` 1/2`."""
    return "".join(
        f" {unicodedata.normalize('NFKC', c).translate(_TYPOGRAPHY)}"
        if unicodedata.decomposition(c).startswith("<fraction>")
        else c
        for c in text.translate(_WIDE).translate(_TYPOGRAPHY)
    )


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
    if mark in "<>":
        return before.isdecimal() or text[at + 1 :].lstrip("=-+.")[:1].isdecimal()
    if mark == "^":
        return before.isalnum() and (after.isalnum() or after in ("-", "{"))
    return (mark in "*=/" and (before + after).strip(" ").isdecimal()) or (
        mark == "%" and before.isdecimal()
    )


def format_number(value: float) -> str:
    """Returns a finite number in decimal digits, without exponent and zeros at the end."""
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
    plain = _write_plainly(text).strip()
    plain = _groups.sub("", plain) if _groups.search(plain) else _thousands.sub("", plain)
    return Decimal(plain) if _number.fullmatch(plain) else None
