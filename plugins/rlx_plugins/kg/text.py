"""Text that the agent is shown: graph and model text in it can neither open nor close a tag."""

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

__all__ = [
    "OVERHEAD",
    "count_fitting_labels",
    "escape_text",
    "format_information",
    "format_label_list",
    "has_visible_text",
]

_OPEN, _CLOSE = "<information> ", " </information>"

OVERHEAD = len(_OPEN) + len(_CLOSE)
"""Characters of `information` beyond its body."""

_NAME = 200
_CUT = "…"


class _Escapes(dict[int, str]):
    """What becomes of each character; made as characters are met."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        # Tokenizers that normalise would make brackets of their wide and small forms again.
        plain = unicodedata.normalize("NFKD", character)
        if "<" in plain or ">" in plain:
            shown = "‹" if "<" in plain else "›"
        elif unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            shown = " "
        else:
            shown = character
        self[code] = shown
        return shown


_ESCAPES = _Escapes()


def escape_text(text: str, limit: int | None = _NAME) -> str:
    """Returns `text` as one line that holds no tag.

    `<` and `>`, and all that Unicode makes of them, become `‹` and `›`; control characters, line
    breaks and marks that change the direction of text become blanks; blanks are squeezed, with
    none at either end.

    Args:
        text: untrusted.
        limit: characters of the result at most, at least 1; a longer one ends in `…`. None for no
            limit.
    """
    clean = " ".join(text.translate(_ESCAPES).split())
    return clean if limit is None else _truncate_text(clean, limit)


def has_visible_text(text: str) -> bool:
    """Tells whether `escape` leaves anything of a text."""
    return bool(text.strip()) if text.isprintable() else bool(escape_text(text))


def count_fitting_labels(
    labels: Sequence[str],
    *,
    prefix: str = "",
    limit: int | None = None,
    max_chars: int | None = None,
    grouped: bool = False,
) -> int:
    """Returns how many of the labels, from the first, `listed` shows."""
    most = len(labels) if limit is None else min(limit, len(labels))
    if max_chars is None:
        return most
    most = min(most, max_chars)  # each takes more than a character
    shown = [escape_text(label) for label in labels[:most]]

    def compute_text_length(count: int) -> int:
        return len(_join_labels(shown[:count], len(labels) - count, prefix, grouped))

    if compute_text_length(most) <= max_chars:
        return most
    # One label more is never shorter: what it adds is longer than a digit that `+k` may lose.
    return max(0, bisect_right(range(most), max_chars, key=compute_text_length) - 1)


def format_label_list(
    labels: Sequence[str],
    *,
    prefix: str = "",
    limit: int | None = None,
    max_chars: int | None = None,
    grouped: bool = False,
) -> str:
    """Returns `prefix A, B, C`; where not all fit, `prefix A, B, +1 more`.

    Args:
        labels: untrusted; each is escaped.
        prefix: what the labels are, such as `borders of France:`; untrusted as well.
        limit: how many labels to show at most; None for all.
        max_chars: characters of the result at most; None for no limit.
        grouped: whether names like `people.person.spouse`, in order, share what is before their
            last dot: `people.person: parents, spouse; location.country: capital`.
    """
    count = count_fitting_labels(
        labels, prefix=prefix, limit=limit, max_chars=max_chars, grouped=grouped
    )
    shown = [escape_text(label) for label in labels[:count]]
    text = _join_labels(shown, len(labels) - count, prefix, grouped)
    return text if max_chars is None else _truncate_text(text, max_chars)


def format_information(body: str, *, max_chars: int | None = None) -> str:
    """Returns `<information> body </information>`, which is closed however much of it is cut.

    Args:
        body: untrusted; it is escaped as a whole.
        max_chars: characters of the result at most, tags included; None for no limit.

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


def _join_labels(shown: Sequence[str], hidden: int, prefix: str, grouped: bool) -> str:
    parts = [_join_name_groups(shown) if grouped else ", ".join(shown)] if shown else []
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
