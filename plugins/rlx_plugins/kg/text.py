"""Formats observations; untrusted graph and model text can neither open nor close a tag in them."""

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

_OPEN, _CLOSE = "<information> ", " </information>"

OVERHEAD = len(_OPEN) + len(_CLOSE)
"""Number of characters that `format_information` adds to its body."""

_NAME = 200
_CUT = "…"


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
    bidirectional marks become spaces; runs of spaces are collapsed, and the ends stripped.

    Args:
        text: untrusted text.
        limit: maximum length of the result in characters, at least 1; longer text is truncated and
            ends in `…`. None for no limit.
    """
    clean = " ".join(text.translate(_ESCAPES).split())
    return clean if limit is None else _truncate_text(clean, limit)


def has_visible_text(text: str) -> bool:
    """Whether `escape_text` leaves anything of a text."""
    return bool(text.strip()) if text.isprintable() else bool(escape_text(text))


def count_fitting_labels(
    labels: Sequence[str],
    *,
    prefix: str = "",
    limit: int | None = None,
    max_chars: int | None = None,
    grouped: bool = False,
) -> int:
    """Returns how many labels, from the first, `format_label_list` shows."""
    most = len(labels) if limit is None else min(limit, len(labels))
    if max_chars is None:
        return most
    most = min(most, max_chars)  # each takes more than a character
    escaped = [escape_text(label) for label in labels[:most]]

    def compute_text_length(count: int) -> int:
        return len(_join_labels(escaped[:count], len(labels) - count, prefix, grouped))

    if compute_text_length(most) <= max_chars:
        return most
    # Monotonic: a further label adds more characters than the digit that `+k` may lose.
    return max(0, bisect_right(range(most), max_chars, key=compute_text_length) - 1)


def format_label_list(
    labels: Sequence[str],
    *,
    prefix: str = "",
    limit: int | None = None,
    max_chars: int | None = None,
    grouped: bool = False,
) -> str:
    """Returns `prefix A, B, C`, or `prefix A, B, +1 more` if not all labels fit.

    Args:
        labels: untrusted texts; each is escaped.
        prefix: a heading such as `borders of France:`; untrusted as well.
        limit: maximum number of labels shown; None for all.
        max_chars: maximum length of the result in characters; None for no limit.
        grouped: whether to group consecutive names such as `people.person.spouse` by the part
            before the last dot: `people.person: parents, spouse; location.country: capital`.
    """
    count = count_fitting_labels(
        labels, prefix=prefix, limit=limit, max_chars=max_chars, grouped=grouped
    )
    escaped = [escape_text(label) for label in labels[:count]]
    text = _join_labels(escaped, len(labels) - count, prefix, grouped)
    return text if max_chars is None else _truncate_text(text, max_chars)


def format_information(body: str, *, max_chars: int | None = None) -> str:
    """Returns `<information> body </information>`; truncation never removes the closing tag.

    Args:
        body: untrusted text; it is escaped as a whole.
        max_chars: maximum length of the result in characters, including tags; None for no limit.

    Raises:
        ValueError: `max_chars` leaves no room between the tags.
    """
    if max_chars is not None and max_chars <= OVERHEAD:
        raise ValueError(f"an observation needs more than {OVERHEAD} characters, got {max_chars}")
    room = None if max_chars is None else max_chars - OVERHEAD
    return f"{_OPEN}{escape_text(body, room)}{_CLOSE}"


def _truncate_text(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return (text[: limit - 1].rstrip() + _CUT)[:limit]


def _join_labels(visible: Sequence[str], hidden: int, prefix: str, grouped: bool) -> str:
    parts = [_join_name_groups(visible) if grouped else ", ".join(visible)] if visible else []
    if hidden:
        parts.append(f"+{hidden} more")
    return " ".join([escape_text(prefix, None), ", ".join(parts)]).strip()


def _join_name_groups(names: Sequence[str]) -> str:
    def get_name_prefix(name: str) -> str:
        return name.rpartition(".")[0]

    groups = []
    for shared, members in groupby(names, key=get_name_prefix):
        own = ", ".join(name.removeprefix(f"{shared}.") if shared else name for name in members)
        groups.append(f"{shared}: {own}" if shared else own)
    return "; ".join(groups)
