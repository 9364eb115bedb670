"""Words for messages; sanitize untrusted text before it reaches a terminal, a log or a database."""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from rlx.errors import EnvironmentFault

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_BLANK = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    r"\U000e0100-\U000e01ef]"
)
"""Invisible characters of other categories: fillers, variation selectors, the blank braille cell.
"""
_LINE_END = re.compile(r"(\r?\n)")
_SURROGATE = re.compile("[\ud800-\udfff]")


def escape_unprintable(text: str) -> str:
    """Returns `text` with control characters, direction marks and invisible characters escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape_character(c) for c in text)


def pluralize_noun(noun: str) -> str:
    """Returns the plural of a kind of turn, such as "answers" or "analyses"."""
    return f"{noun[:-2]}es" if noun.endswith("is") else f"{noun}s"


def escape_lines(text: str) -> str:
    """Escapes like `escape_unprintable`, but keeps the ends of lines."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        part if part in ("\n", "\r\n") else escape_unprintable(part)
        for part in _LINE_END.split(text)
    )


def _escape_character(character: str) -> str:
    if character == "\t":
        return " "
    if unicodedata.category(character) in _HIDDEN or _BLANK.match(character):
        return character.encode("unicode_escape").decode("ascii")
    return character


def format_duration(seconds: float) -> str:
    """Formats a duration as minutes and seconds, or hours, minutes, seconds: `07:05`, `1:02:03`."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")


def format_timestamp() -> str:
    """Returns the local date and time to the second, such as `2026-03-01 14:05:09`."""
    return datetime.now().isoformat(" ", "seconds")


def replace_surrogates(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot encode, by U+FFFD; the length stays the same."""
    return text if text.isascii() else _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def shorten_for_record(text: str, longest: int) -> str:
    """Returns `text` as any database can store it, and cut at `longest` characters.

    Lone surrogates become U+FFFD and NUL becomes "␀". A cut is marked.

    Example:
        >>> shorten_for_record("no target\0" * 9, 9)
        'no target… (90 characters)'
    """
    whole = len(text)
    text = replace_surrogates(text[:longest]).replace("\0", "␀")
    return text if whole <= longest else f"{text}… ({whole:,} characters)"


def redact_passwords(text: str, *urls: str) -> str:
    """Replaces passwords in URLs by `***`: those after a user's name, those in a query, and those
    of `urls`, which the text may repeat on their own.

    Where a line leaves open how far a password goes, the rest of the line is taken for it.

    Example:
        >>> redact_passwords("postgresql://ann:s3cret@db/rlx")
        'postgresql://ann:***@db/rlx'
    """
    secrets = {secret for url in urls for secret in list_url_secrets(url)}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) < SHORTEST:
            break
        text = text.replace(secret, "***")
    text = _USER_PASSWORD.sub(r"\1:***@", text)
    text = _WEB_TOKEN.sub(r"\1***@", text)
    return _QUERY_VALUE.sub(lambda m: f"{m[1]}***" if _is_secret_name(m[2]) else m[0], text)


_USER_PASSWORD = re.compile(r"(://[^:/\n]*):[^@\n]*@(?:[^/?#\s@]*@)*")
"""Up to the first `@`, as SQLAlchemy reads a URL, or the last one before the path, as HTTP does."""
_WEB_TOKEN = re.compile(r"(https?://)([^:/?#\s@]+)@", re.I)
"""The name of a user without a password, which for a web server is a token."""
_QUERY_VALUE = re.compile(r"([?&]([^=&\s]+)=)(?!\*{3}(?:[\s&\"',;)]|$))([^&\n]+)")
_SECRET_NAME = re.compile(
    r"(pass|passwd|password|pwd|secret|token|(api|access)_?key|credential|signature|^sig)$", re.I
)
SHORTEST = 4
"""Minimum length of a secret that is replaced wherever it stands; shorter ones are in words."""


def _is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(unquote(name)) is not None


def redact_values(value: Any) -> Any:
    """Returns a JSON value with `redact_passwords` applied to each of its strings."""
    if isinstance(value, Mapping):
        return {name: redact_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(each) for each in value]
    return redact_passwords(value) if isinstance(value, str) else value


def list_url_secrets(url: str) -> list[str]:
    """Passwords in a database or tracking URL, as they are written, decoded and encoded.

    Example:
        >>> list_url_secrets("postgresql://ann@db/rlx?password=s%2F3")
        ['s%2F3', 's/3', 's%252F3']
    """
    if "@" not in url and "=" not in url:
        return []
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    found = [text[1] for text in re.finditer(r"://[^:/]*:(.*)@", url, re.DOTALL)]
    found += [part for text in found for part in text.split("@")]  # a raw @ ends it, or does not
    found += [each for m in _WEB_TOKEN.finditer(url) for each in (m[2], unquote(m[2]))]
    found += [m[3] for m in _QUERY_VALUE.finditer(url) if _is_secret_name(m[2])]
    with suppress(ArgumentError, ValueError):
        parsed = make_url(url)
        found += [] if parsed.password is None else [str(parsed.password)]
        for name, values in parsed.query.items():
            if _is_secret_name(name):
                found += [values] if isinstance(values, str) else list(values)
    found += [
        written for one in found for written in (quote(one), quote_plus(one), repr(one)[1:-1])
    ]
    return list(dict.fromkeys(secret for secret in found if secret))


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turns an OSError in the block into an `EnvironmentFault` that names the file."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has left, which is no failure
    except OSError as error:
        where = escape_unprintable(str(path))
        raise EnvironmentFault(f"cannot write {where}: {error.strerror or error}") from error


def write_text_file(path: Path, text: str) -> None:
    """Writes a text as UTF-8, in a folder that is made if it is missing."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def find_last_block(
    text: str, opening: str, closing: str, start: int = 0
) -> tuple[int, int] | None:
    """Returns where the content of the last block between two tags in `text[start:]` is, or None.

    It is the group of the last match of the regular expression `opening(.*?)closing`, with `.`
    matching line ends, which takes quadratic time on `opening * n`. Every match ends at a closing
    tag and begins at the first opening tag after the previous closing tag, so the search visits
    closing tags from the end until one has an opening tag of its own.
    """
    first = text.find(opening, start)
    end = text.rfind(closing, first) if first >= 0 else -1
    while end >= 0:
        previous = text.rfind(closing, first, end)
        begin = first if previous < 0 else text.find(opening, previous + len(closing), end)
        if begin >= 0:
            return begin + len(opening), end
        end = previous
    return None


def get_last_block(text: str, opening: str, closing: str, start: int = 0) -> str | None:
    """Returns the content of the last block between two tags in `text[start:]`, or None."""
    found = find_last_block(text, opening, closing, start)
    return None if found is None else text[slice(*found)]
