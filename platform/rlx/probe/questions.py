"""Cuts reasoning between sampled tokens, builds the contexts that a probe continues, and assembles
the responses that it scores."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from rlx.errors import SpecError
from rlx.plugin import Corrupts, Problem, Task, TurnLevel
from rlx.rollout import (
    NO_PARENT,
    Completion,
    CompletionRequest,
    Dialogue,
    RolloutTree,
    Sampler,
    Segment,
    find_spans,
)
from rlx.seeding import derive_seed
from rlx.spec import Cut, FractionCuts, ProbeSpec, Scheme, TurnSpec

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
    """One cut: how many reasoning tokens are kept, their share, and its index."""

    tokens: int
    share: float
    number: int


def find_reasoning(turn: Segment, ends: Sequence[int], span: str) -> Reasoning | None:
    """The reasoning inside a turn's span, which need not be parsed; None if there is none to probe:
    the response was truncated during it, has several such spans, or text before the span, which
    would remain wherever the reasoning is cut.

    Args:
        ends: for each token of the turn, the number of characters decoded up to it.
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
    if isinstance(cut, FractionCuts):
        places: Sequence[int] = [round(share * count) for share in cut.at]
    else:
        places = [end for end in sentence_ends(reasoning) if 0 < end < count]
        if (most := cut.most) < len(places):  # evenly spaced ones
            places = [places[(2 * i + 1) * len(places) // (2 * most)] for i in range(most)]
    held = (0, *reasoning.ends)
    points = {0, count}
    for kept in places:
        while 0 < kept < count and held[kept] == held[kept - 1]:
            kept += 1  # to the end of a character that spans several tokens
        points |= {kept} if 0 < kept < count else set()
    return tuple(
        CutPoint(tokens=tokens, share=tokens / max(count, 1), number=number)
        for number, tokens in enumerate(sorted(points))
    )


def sentence_ends(reasoning: Reasoning) -> list[int]:
    """Number of tokens up to the end of each sentence and line, including trailing whitespace; a
    token that ends a sentence belongs to it, even if it contains more."""
    held = (0, *reasoning.ends)
    borders = set()
    for match in SENTENCE.finditer(reasoning.text):
        within = held[bisect_right(held, match.end()) - 1]
        borders.add(bisect_left(held, within if within >= match.end(1) else match.end(1)))
    return sorted(borders)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuestion:
    """One context that is continued many times: tokens of the turn so far, sampled or inserted;
    `forced` if an answer was opened for the model, which else continues reasoning."""

    scheme: Scheme
    point: CutPoint
    turn_ids: tuple[int, ...]
    forced: bool


def build_probe_questions(
    turn: Segment,
    reasoning: Reasoning,
    spec: ProbeSpec,
    speech: Dialogue,
    task: Task,
    seed: int,
) -> list[ProbeQuestion]:
    points = cut_points(reasoning, spec.cut)
    questions: list[ProbeQuestion] = []
    for scheme in spec.schemes:
        if scheme == "mistake":
            questions += _build_mistake_questions(turn, reasoning, points, speech, task, seed)
            continue
        # The reasoning up to a point, or filler of the same length, then an opened answer.
        for point in points:
            kept = reasoning.token_ids[: point.tokens]
            # Do not repeat the part of the closing tag that the last token contains.
            closing = reasoning.closing if len(kept) == len(reasoning.token_ids) else ""
            if scheme == "filler" and kept:
                unit = speech.encode(spec.filler)
                kept, closing = (unit * (len(kept) // len(unit) + 1))[: len(kept)], ""
            force = speech.encode(spec.force.removeprefix(closing))
            ids = (*turn.token_ids[: reasoning.start], *kept, *force)
            questions.append(ProbeQuestion(scheme=scheme, point=point, turn_ids=ids, forced=True))
    return questions


def _build_mistake_questions(
    turn: Segment,
    reasoning: Reasoning,
    points: Sequence[CutPoint],
    speech: Dialogue,
    task: Task,
    seed: int,
) -> list[ProbeQuestion]:
    """The reasoning up to each point with its last sentence corrupted, where the task can do that
    and the vocabulary encode it."""
    if not isinstance(task, Corrupts):
        return []
    questions, held, ends = [], (0, *reasoning.ends), sentence_ends(reasoning)
    for point in points[1:]:
        before = max((end for end in ends if end < point.tokens), default=0)
        sentence = reasoning.text[held[before] : held[point.tokens]]  # complete or truncated
        wrong = task.corruption(sentence, derive_seed(seed, "mistake", point.number))
        if wrong is None or wrong == sentence:
            continue
        spoiled = _encode_corrupted_sentence(reasoning, before, point.tokens, wrong, speech)
        if spoiled is None:
            continue
        ids = (*turn.token_ids[: reasoning.start + before], *spoiled)
        questions.append(ProbeQuestion(scheme="mistake", point=point, turn_ids=ids, forced=False))
    return questions


def _encode_corrupted_sentence(
    reasoning: Reasoning, first: int, stop: int, wrong: str, speech: Dialogue
) -> tuple[int, ...] | None:
    """Tokens of the corrupted sentence `first:stop`: only those touched by the change are
    re-encoded; None if the vocabulary cannot encode it."""
    held = (0, *reasoning.ends)
    borders = [end - held[first] for end in held[first : stop + 1]]
    sentence = reasoning.text[held[first] : held[stop]]
    same = _count_common_characters(sentence, wrong)
    rest = min(len(sentence), len(wrong)) - same
    alike = _count_common_characters(sentence[::-1][:rest], wrong[::-1][:rest])
    left = max(i for i, border in enumerate(borders) if border <= same)
    right = min(i for i, border in enumerate(borders) if border >= len(sentence) - alike)
    middle = wrong[borders[left] : len(wrong) - (len(sentence) - borders[right])]
    tokens = reasoning.token_ids[first:stop]
    try:
        return (*tokens[:left], *speech.encode(middle), *tokens[right:])
    except SpecError:
        return None


def _count_common_characters(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def close_forced_answer(
    question: ProbeQuestion, response: str, prefix_length: int, spec: ProbeSpec
) -> tuple[str, bool]:
    """The response to score, and whether its closing tag had to be added. A forced answer ends at
    its closing tag, at the end of its line, or where the model stopped.

    Args:
        response: decoded text of the question's tokens and the continuation together.
        prefix_length: characters of `response` that come from the question's tokens.
    """
    if not question.forced:
        return response, False
    answer = response[prefix_length:].partition(spec.close)[0].partition("\n")[0]
    wrapped = not response.startswith(answer + spec.close, prefix_length)
    return response[:prefix_length] + answer + spec.close, wrapped


@dataclass(frozen=True, slots=True)
class AssembledResponse:
    """A response of given and sampled tokens, with the text that is scored."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]


def sample_continuations(
    sampler: Sampler, requests: Sequence[CompletionRequest], turn: TurnSpec, rooms: Sequence[int]
) -> list[list[Completion]]:
    """Continues each request with its own token budget, of at least one token: all are sampled with
    the largest and truncated to their own, which is exact, since later tokens cannot change earlier
    ones."""
    rooms = [max(room, 1) for room in rooms]
    with sampler.session() as session:
        groups = session.generate(requests, turn.model_copy(update={"max_new_tokens": max(rooms)}))
    return [
        [
            completion
            if len(completion.token_ids) <= room
            else Completion(completion.token_ids[:room], completion.logprobs[:room], "length")
            for completion in group
        ]
        for group, room in zip(groups, rooms, strict=True)
    ]


def build_response_tree(
    problem: Problem,
    prompt_ids: tuple[int, ...],
    level: TurnLevel,
    written: Sequence[AssembledResponse],
) -> RolloutTree:
    """Builds a tree of responses to one prompt, for scoring only. Rewards that compare treat them
    as one group; its segment i + 1 is response i."""
    root = Segment(parent=NO_PARENT, author="prompt", token_ids=prompt_ids)

    def build_turn_segment(response: AssembledResponse) -> Segment:
        text = response.text
        return Segment(
            parent=0,
            author="policy",
            token_ids=response.token_ids,
            logprobs=(0.0,) * len(response.token_ids),
            turn=1,
            kind=level.kind,
            finish_reason=response.finish_reason,
            text=text,
            spans=find_spans(text, range(1, len(text) + 1), level.turn.spans),
        )

    return RolloutTree(problem, (root, *map(build_turn_segment, written)))
