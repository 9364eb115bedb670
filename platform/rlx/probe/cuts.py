"""Where reasoning is cut: between tokens that were sampled, never within one."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlx.rollout import Segment, find_spans
from rlx.spec import Cut, FractionCuts, SentenceCuts

__all__ = ["CutPoint", "Reasoning", "cut_points", "find_reasoning", "sentence_ends"]

# One mark only, so that a text of nothing but dots is read in linear time.
SENTENCE = re.compile(r"([.!?](?=\s)|[\u3002\uff01\uff1f]|\n)\s*")
"""What ends a sentence: its last mark before white space, a full-width one, or the end of a line;
and the white space behind it."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of one sampled turn.

    Attributes:
        start: tokens of the turn before it; one that holds the last of the opening tag is the
            last of them, whatever else it holds.
        token_ids: its own tokens; the last may hold the first of the closing tag.
        text: what they decode to, without that.
        ends: for each of its tokens, the characters of `text` decoded once it has been added.
        closing: what of the closing tag its tokens hold, or those before it; mostly "".
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
        tokens: tokens of reasoning that are kept.
        share: of all its tokens, from 0 to 1; 0 where there are none.
        number: of the point, from 0, which is no reasoning at all.
    """

    tokens: int
    share: float
    number: int


def find_reasoning(turn: Segment, ends: Sequence[int], span: str) -> Reasoning | None:
    """The reasoning inside a turn's span; None where the turn has no such span.

    A response that was cut off while it reasoned has none either: it has no end to measure shares
    by, and no answer to compare others with. Nor has one that reasons more than once, or that says
    something first: what stands before the span would stay wherever the reasoning is cut.

    Args:
        turn: a policy's segment.
        ends: for each of its tokens the characters decoded after it.
        span: the span's name, whether or not the turn's own spans were looked for under it.
    """
    found = find_spans(turn.text, range(1, len(turn.text) + 1), (span,)).get(span)
    if found is None or turn.text[: found.outer[0]].strip() or f"</{span}>" in found.text:
        return None
    opened, closed = found.inner  # of characters, since each was a token here
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
    """The points at which a reasoning is cut, none twice; no reasoning and all of it among them."""
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
    """Tokens up to the end of each sentence and line, white space behind it included.

    A token that begins with that white space and goes on with the next sentence belongs to the
    next one; one that ends a sentence belongs to it, whatever else it holds.
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
    """So many tokens, and those that complete the character that the last of them begins."""
    while 0 < kept < len(ends) and ends[kept - 1] == (ends[kept - 2] if kept > 1 else 0):
        kept += 1
    return kept


def _select_even_points(points: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of them, evenly over all."""
    if len(points) <= most:
        return points
    return [points[(2 * i + 1) * len(points) // (2 * most)] for i in range(most)]
