"""Finds named spans in the decoded text of a turn and maps them to its tokens."""

from collections.abc import Mapping, Sequence

from rlx.rollout.tree import Span

__all__ = ["find_spans"]


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
