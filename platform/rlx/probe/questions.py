"""Build the contexts that a probe continues, and the responses that it scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from rlx.errors import SpecError
from rlx.plugin import Corrupts, Task
from rlx.probe.cuts import CutPoint, Reasoning, cut_points, sentence_ends
from rlx.rollout import Dialogue, Segment
from rlx.seeding import derive_seed
from rlx.spec import ProbeSpec, Scheme

__all__ = ["ProbeDialogue", "ProbeQuestion", "build_probe_questions", "close_forced_answer"]


class ProbeDialogue(Dialogue, Protocol):
    """A dialogue that can also encode plain text."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of `text`, without special tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuestion:
    """One context that is continued many times.

    Attributes:
        scheme: how the reasoning was changed.
        point: where the reasoning was cut.
        turn_ids: tokens of the turn so far, sampled or inserted.
        forced: whether an answer was opened for the model; otherwise it continues reasoning.
    """

    scheme: Scheme
    point: CutPoint
    turn_ids: tuple[int, ...]
    forced: bool


def build_probe_questions(
    turn: Segment,
    reasoning: Reasoning,
    spec: ProbeSpec,
    speech: ProbeDialogue,
    task: Task,
    seed: int,
) -> list[ProbeQuestion]:
    """Builds the questions about one turn, ordered by scheme, then by point."""
    points = cut_points(reasoning, spec.cut)
    questions: list[ProbeQuestion] = []
    for scheme in spec.schemes:
        if scheme == "mistake":
            questions += _build_mistake_questions(turn, reasoning, points, speech, task, seed)
        else:
            questions += [
                _build_forced_question(turn, reasoning, p, scheme, spec, speech) for p in points
            ]
    return questions


def _build_forced_question(
    turn: Segment,
    reasoning: Reasoning,
    point: CutPoint,
    scheme: Scheme,
    spec: ProbeSpec,
    speech: ProbeDialogue,
) -> ProbeQuestion:
    """The reasoning up to a point, or filler of the same length, followed by an opened answer."""
    kept = reasoning.token_ids[: point.tokens]
    # Do not repeat the part of the closing tag that the last token contains.
    closing = reasoning.closing if len(kept) == len(reasoning.token_ids) else ""
    if scheme == "filler" and kept:
        unit = speech.encode(spec.filler)
        kept, closing = (unit * (len(kept) // len(unit) + 1))[: len(kept)], ""
    force = speech.encode(spec.force.removeprefix(closing))
    ids = (*turn.token_ids[: reasoning.start], *kept, *force)
    return ProbeQuestion(scheme=scheme, point=point, turn_ids=ids, forced=True)


def _build_mistake_questions(
    turn: Segment,
    reasoning: Reasoning,
    points: Sequence[CutPoint],
    speech: ProbeDialogue,
    task: Task,
    seed: int,
) -> list[ProbeQuestion]:
    """The reasoning up to each point with its last sentence corrupted.

    A point is skipped if the task cannot corrupt its sentence, or if the vocabulary cannot encode
    the corrupted sentence.
    """
    if not isinstance(task, Corrupts):
        return []
    questions = []
    for point in points[1:]:
        before, sentence = _last_sentence(reasoning, point)
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
    reasoning: Reasoning, first: int, stop: int, wrong: str, speech: ProbeDialogue
) -> tuple[int, ...] | None:
    """Tokens of a corrupted sentence: only tokens touched by the change are re-encoded.

    Args:
        reasoning: reasoning that contains the sentence.
        first, stop: token range of the sentence, half-open.
        wrong: text of the corrupted sentence.
        speech: encodes the changed text.

    Returns:
        The tokens; None if the vocabulary cannot encode the change.
    """
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
    """Length of the common prefix of two strings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _last_sentence(reasoning: Reasoning, point: CutPoint) -> tuple[int, str]:
    """Number of tokens before the last kept sentence, and its text, complete or truncated."""
    before = max((end for end in sentence_ends(reasoning) if end < point.tokens), default=0)
    held = (0, *reasoning.ends)
    return before, reasoning.text[held[before] : held[point.tokens]]


def close_forced_answer(
    question: ProbeQuestion, response: str, prefix_length: int, spec: ProbeSpec
) -> tuple[str, bool]:
    """The response to score, and whether its closing tag had to be added.

    A forced answer ends at its closing tag, at the end of its line, or where the model stopped. A
    missing tag is added, as in the faithfulness probe of TinyZero Countdown.

    Args:
        question: the continued question.
        response: decoded text of the question's tokens and the continuation together.
        prefix_length: characters of `response` that come from the question's tokens.
        spec: has the closing tag of an answer.
    """
    if not question.forced:
        return response, False
    answer = response[prefix_length:].partition(spec.close)[0].partition("\n")[0]
    wrapped = not response.startswith(answer + spec.close, prefix_length)
    return response[:prefix_length] + answer + spec.close, wrapped
