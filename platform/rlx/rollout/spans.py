"""Finds named spans in the decoded text of a turn, and their hull, and maps them to its tokens."""

from collections.abc import Mapping, Sequence

from rlx.rollout.tree import Span

__all__ = ["find_hull", "find_spans"]


def find_spans(
    text: str, ends: Sequence[int], names: Sequence[str], *, first_turn: bool = True
) -> Mapping[str, Span]:
    """Finds the last `<name>...</name>` of each name.

    Args:
        text: decoded text of the turn's tokens.
        ends: for every token, the number of characters decoded up to and including it;
            non-decreasing. A character belongs to the token that completes it.
        names: tags to find.
        first_turn: `</think>` without `<think>` counts from the start of the turn, since prompts
            may already open the tag.

    Returns:
        The spans that were found. A token that crosses a boundary belongs to the span.
    """
    found: dict[str, Span] = {}
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        close = text.rfind(closing)
        if close < 0:
            continue
        begin = text.rfind(opening, 0, close)
        if begin < 0:
            if not (first_turn and name == "think"):
                continue
            begin, inside = 0, 0
        else:
            inside = begin + len(opening)
        found[name] = Span(
            outer=_find_token_range(ends, begin, close + len(closing)),
            inner=_find_token_range(ends, inside, close),
            text=text[inside:close],
        )
    return found


def find_hull(
    text: str, ends: Sequence[int], names: Sequence[str], *, first_turn: bool = True
) -> tuple[int, int] | None:
    """Finds what reaches from the first of several spans to the last, words between them included.

    It begins with the first tag that is opened, in the order of `names`. It ends where the last
    span is closed, or with the turn if that is missing.

    Args:
        text, ends, names, first_turn: as in `find_spans`.

    Returns:
        A half-open range of tokens; None if no span is opened.

    Reference:
        RLCR in two turns (RLCR: arXiv 2507.16806): from think to the end of the answer, from the
        analysis, if there is one, to the end of the confidence.
    """
    openings = (_find_opening(text, name, first_turn) for name in names)
    begin = next((at for at in openings if at is not None), None)
    if begin is None:
        return None
    closing = f"</{names[-1]}>"
    close = text.rfind(closing, begin)
    if close < 0:
        return _find_token_range(ends, begin, len(text))[0], len(ends)
    return _find_token_range(ends, begin, close + len(closing))


def _find_opening(text: str, name: str, first_turn: bool) -> int | None:
    """Where `<name>` stands for the first time; the start of a turn that only closes `think`."""
    opening = text.find(f"<{name}>")
    if opening >= 0:
        return opening
    return 0 if first_turn and name == "think" and "</think>" in text else None


def _find_token_range(ends: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Half-open range of the tokens that contain any part of `text[start:stop]`.

    Bytes of an incomplete character do not advance the text and belong to what follows them.
    """
    if start >= stop:
        at = sum(1 for end in ends if end <= start)
        return at, at
    reached = next((i for i, end in enumerate(ends) if end >= start), len(ends) - 1)
    first = reached + 1 if start and ends[reached] == start else reached
    last = next((i for i, end in enumerate(ends) if end >= stop), len(ends) - 1)
    return first, last + 1
