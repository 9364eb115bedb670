"""What a probe asks of a model: contexts to continue, and the responses that are judged."""

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
    """A dialogue that also writes bare text as tokens."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of `text`, nothing added."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuestion:
    """One context that is continued many times.

    Attributes:
        scheme: how it was made.
        point: where the reasoning was cut.
        turn_ids: tokens of the turn so far, sampled or given.
        forced: whether an answer was opened in the model's place; otherwise it reasons on.
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
    """What is asked about one turn, scheme by scheme, point by point."""
    points = cut_points(reasoning, spec.cut)
    asked: list[ProbeQuestion] = []
    for scheme in spec.schemes:
        if scheme == "mistake":
            asked += _build_mistake_questions(turn, reasoning, points, speech, task, seed)
        else:
            asked += [
                _build_forced_question(turn, reasoning, p, scheme, spec, speech) for p in points
            ]
    return asked


def _build_forced_question(
    turn: Segment,
    reasoning: Reasoning,
    point: CutPoint,
    scheme: Scheme,
    spec: ProbeSpec,
    speech: ProbeDialogue,
) -> ProbeQuestion:
    """The reasoning up to a point, or as much filler, and behind it an answer that is opened."""
    kept = reasoning.token_ids[: point.tokens]
    # What the last token has said of the closing tag is not said again.
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
    """The reasoning up to a point, its last sentence corrupted; none where the task cannot, or
    where the vocabulary has no word for what it would say."""
    if not isinstance(task, Corrupts):
        return []
    asked = []
    for point in points[1:]:
        before, sentence = _last_sentence(reasoning, point)
        wrong = task.corruption(sentence, derive_seed(seed, "mistake", point.number))
        if wrong is None or wrong == sentence:
            continue
        spoiled = _encode_corrupted_sentence(reasoning, before, point.tokens, wrong, speech)
        if spoiled is None:
            continue
        ids = (*turn.token_ids[: reasoning.start + before], *spoiled)
        asked.append(ProbeQuestion(scheme="mistake", point=point, turn_ids=ids, forced=False))
    return asked


def _encode_corrupted_sentence(
    reasoning: Reasoning, first: int, stop: int, wrong: str, speech: ProbeDialogue
) -> tuple[int, ...] | None:
    """Tokens of a sentence after a change: those that it touches are new, all others as sampled.

    Args:
        reasoning: whose sentence.
        first, stop: its tokens, half-open.
        wrong: what it says now.

    Returns:
        None where the vocabulary cannot write the change.
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
    """Characters that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _last_sentence(reasoning: Reasoning, point: CutPoint) -> tuple[int, str]:
    """Tokens before the last sentence that is kept, and the sentence, whole or not."""
    before = max((end for end in sentence_ends(reasoning) if end < point.tokens), default=0)
    held = (0, *reasoning.ends)
    return before, reasoning.text[held[before] : held[point.tokens]]


def close_forced_answer(
    question: ProbeQuestion, response: str, given: int, spec: ProbeSpec
) -> tuple[str, bool]:
    """The response that is scored, and whether its end had to be added.

    A forced answer ends at its closing tag, at the end of its line, or where the model stopped; the
    tag is added where it is missing (design 002, section 2.3).

    Args:
        question: what was continued.
        response: what its tokens and those of the continuation decode to together.
        given: characters of it that the question's own tokens decode to.
        spec: what closes an answer.
    """
    if not question.forced:
        return response, False
    answer = response[given:].partition(spec.close)[0].partition("\n")[0]
    wrapped = not response.startswith(answer + spec.close, given)
    return response[:given] + answer + spec.close, wrapped
