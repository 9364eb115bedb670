"""Writes prompts and observations; untrusted text can neither open nor close a tag in them."""

import unicodedata
from collections.abc import Sequence

from rlx_plugins.templates import fill_template

_OPEN, _CLOSE = "<information> ", " </information>"

OVERHEAD = len(_OPEN) + len(_CLOSE)
"""Number of characters that `format_information` adds to its body."""

_NAME = 200


class _Escapes(dict[int, str]):
    """Translation table for `escape_text`, filled lazily."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        # Tokenizers that normalize text would turn wide and small forms back into brackets.
        plain = unicodedata.normalize("NFKD", character)
        if "<" in plain or ">" in plain:
            escaped = "‹" if "<" in plain else "›"
        elif unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            escaped = " "
        else:
            escaped = character
        self[code] = escaped
        return escaped


_ESCAPES = _Escapes()


def escape_text(text: str, limit: int | None = _NAME) -> str:
    """Returns `text` as one line without tags.

    `<`, `>` and their Unicode variants become `‹` and `›`; control characters, line breaks and
    bidirectional marks become spaces; runs of spaces are collapsed, and the ends stripped. Text of
    more than `limit` characters is truncated and ends in `…`.
    """
    clean = " ".join(text.translate(_ESCAPES).split())
    return clean if limit is None else _truncate_text(clean, limit)


def has_visible_text(text: str) -> bool:
    """Whether `escape_text` leaves anything of a text."""
    return bool(text.strip()) if text.isprintable() else bool(escape_text(text))


def format_label_list(
    labels: Sequence[str], *, prefix: str, limit: int, max_chars: int
) -> tuple[int, str]:
    """Returns how many labels are shown, and the text: `prefix A, B` or `prefix A, B, +1 more`."""
    most = min(limit, len(labels), max_chars)  # each takes more than a character
    escaped = [escape_text(label) for label in labels[:most]]
    heading = escape_text(prefix, None)

    def join_labels(count: int) -> str:
        hidden = len(labels) - count
        listed = [*escaped[:count], *([f"+{hidden} more"] if hidden else [])]
        return f"{heading} {', '.join(listed)}".strip()

    while most and len(join_labels(most)) > max_chars:
        most -= 1
    return most, _truncate_text(join_labels(most), max_chars)


def format_information(body: str, max_chars: int) -> str:
    """Returns `<information> body </information>`; truncation never removes the closing tag."""
    return f"{_OPEN}{escape_text(body, max_chars - OVERHEAD)}{_CLOSE}"


def _truncate_text(text: str, limit: int) -> str:
    return text if len(text) <= limit else (text[: limit - 1].rstrip() + "…")[:limit]


def fill_prompt(template: str, question: str, entities: Sequence[str]) -> str:
    """Returns a question's prompt; untrusted entities are escaped, and quoted as in a query."""
    shown = [escape_text(name) for name in entities]
    quoted = [f"'{name}'" if '"' in name else f'"{name}"' for name in shown]
    return fill_template(template, {"question": question, "entities": ", ".join(quoted) or "none"})
