"""Choose where to cut reasoning: between sampled tokens, never within one."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlx.rollout import Segment, find_spans
from rlx.spec import Cut, FractionCuts, SentenceCuts

__all__ = ["CutPoint", "Reasoning", "cut_points", "find_reasoning", "sentence_ends"]

# A single mark, so that matching a text of only dots takes linear time.
SENTENCE = re.compile(r"([.!?](?=\s)|[\u3002\uff01\uff1f]|\n)\s*")
"""End of a sentence: the last punctuation mark before whitespace, a full-width mark, or a line
break, followed by any whitespace."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of one sampled turn.

    Attributes:
        start: number of tokens of the turn before it. The token with the end of the opening tag is
            the last of them, even if it contains more.
        token_ids: its own tokens; the last may contain the start of the closing tag.
        text: their decoded text, without the closing tag.
        ends: for each of its tokens, the number of characters of `text` decoded up to it.
        closing: part of the closing tag in its tokens, or in those before it; usually "".
    """

    start: int
    token_ids: tuple[int, ...]
    text: str
    ends: tuple[int, ...]
    closing: str = ""


@dataclass(frozen=True, slots=True)
class CutPoint:
    """One cut.

    Attributes:
        tokens: number of reasoning tokens that are kept.
        share: share of all reasoning tokens, from 0 to 1; 0 if there are none.
        number: index of the point; 0 keeps no reasoning.
    """

    tokens: int
    share: float
    number: int


def find_reasoning(turn: Segment, ends: Sequence[int], span: str) -> Reasoning | None:
    """The reasoning inside a turn's span; None if there is none that can be probed.

    A response truncated during its reasoning has none: it has no end to measure shares by, and no
    answer to compare with. Neither has a response with several reasoning spans, or with text before
    the span, which would remain wherever the reasoning is cut.

    Args:
        turn: a policy segment.
        ends: for each of its tokens, the number of characters decoded up to it.
        span: name of the span, which need not be among the turn's parsed spans.
    """
    found = find_spans(turn.text, range(1, len(turn.text) + 1), (span,)).get(span)
    if found is None or turn.text[: found.outer[0]].strip() or f"</{span}>" in found.text:
        return None
    opened, closed = found.inner  # in characters: find_spans was given one "token" per character
    held = (0, *ends)
    start, stop = bisect_left(held, opened), bisect_left(held, closed)
    before = held[start]
    return Reasoning(
        start=start,
        token_ids=turn.token_ids[start:stop],
        text=turn.text[before:closed],
        ends=tuple(min(end, closed) - before for end in ends[start:stop]),
        closing=turn.text[closed : held[stop]],
    )


def cut_points(reasoning: Reasoning, cut: Cut) -> tuple[CutPoint, ...]:
    """The distinct points at which to cut a reasoning, including none and all of it."""
    count = len(reasoning.token_ids)
    inside = (
        _complete_last_character(reasoning.ends, kept)
        for kept in _compute_cut_positions(reasoning, cut)
    )
    kept = sorted({0, count, *(tokens for tokens in inside if 0 < tokens < count)})
    return tuple(
        CutPoint(tokens=tokens, share=tokens / max(count, 1), number=number)
        for number, tokens in enumerate(kept)
    )


def sentence_ends(reasoning: Reasoning) -> list[int]:
    """Number of tokens up to the end of each sentence and line, including trailing whitespace.

    A token that starts with this whitespace and continues with the next sentence belongs to the
    next sentence. A token that ends a sentence belongs to it, even if it contains more.
    """
    held = (0, *reasoning.ends)
    borders = set()
    for match in SENTENCE.finditer(reasoning.text):
        within = held[bisect_right(held, match.end()) - 1]
        borders.add(bisect_left(held, within if within >= match.end(1) else match.end(1)))
    return sorted(borders)


def _compute_cut_positions(reasoning: Reasoning, cut: Cut) -> Iterable[int]:
    count = len(reasoning.token_ids)
    if isinstance(cut, FractionCuts):
        return [round(share * count) for share in cut.at]
    if isinstance(cut, SentenceCuts):
        return _select_even_points(
            [end for end in sentence_ends(reasoning) if 0 < end < count], cut.most
        )
    return range(cut.every, count, cut.every)


def _complete_last_character(ends: Sequence[int], kept: int) -> int:
    """Extends `kept` tokens to the end of a character that spans several tokens."""
    while 0 < kept < len(ends) and ends[kept - 1] == (ends[kept - 2] if kept > 1 else 0):
        kept += 1
    return kept


def _select_even_points(points: Sequence[int], most: int) -> Sequence[int]:
    """Selects at most `most` evenly spaced points."""
    if len(points) <= most:
        return points
    return [points[(2 * i + 1) * len(points) // (2 * most)] for i in range(most)]
