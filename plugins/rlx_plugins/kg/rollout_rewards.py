"""Rewards for whole rollouts of the agent (after KG-R1, arXiv 2509.26383).

Several names of one answer, its label and its aliases, count once.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Literal

from rlx.plugin import Example, Reward, Sample, Score
from rlx_plugins.answer_text import normalize_answer
from rlx_plugins.examples import build_example
from rlx_plugins.kg.protocol import read_turn
from rlx_plugins.kg.text import escape_text, has_visible_text

_MAX_NAMES = 256
"""Maximum number of names in an answer; an answer with more scores 0."""
_PIECES = 4
"""Maximum number of comma-separated pieces in one name, such as `Washington, D.C.`; more if a right
answer has more."""


# Names -------------------------------------------------------------------------------------------


def normalize_name(name: str) -> str:
    """Returns the normal form by which names are compared; "" for a name without visible text."""
    return normalize_answer(escape_text(name))


def _index_answer_names(answers: Any) -> dict[str, int]:
    """The number of the right answer of each name, in normal form; answers that share a name have
    one number, because no agent could distinguish them."""
    lists = isinstance(answers, list | tuple) and all(
        isinstance(names, list | tuple)
        and names
        and all(isinstance(name, str) and has_visible_text(name) for name in names)
        for names in answers
    )
    if not lists or not answers:
        raise ValueError(f"the field 'answers' must hold lists of names, got {answers!r}")
    numbers: dict[str, int] = {}
    for number, names in enumerate(answers):
        own = {normalize_name(name) for name in names}
        shared = {numbers[name] for name in own if name in numbers}
        if len(shared) > 1:
            own.update(name for name, other in numbers.items() if other in shared)
        numbers.update(dict.fromkeys(own, min(shared, default=number)))
    return numbers


def parse_named_answers(
    text: str, answers: Mapping[str, int], pieces: int = _PIECES
) -> list[int | str]:
    """Returns the distinct names in an answer's text: numbers of right answers, other names' forms.

    Commas and line breaks separate names, of which one may span up to `pieces` parts.
    """
    between = (piece for piece in re.finditer(r"[^,\n]+", text) if has_visible_text(piece[0]))
    spans = [piece.span() for piece in islice(between, _MAX_NAMES + 1)]
    found: dict[int | str, None] = {}
    at = 0
    while at < len(spans):
        for count in range(min(pieces, len(spans) - at), 0, -1):
            name = normalize_name(text[spans[at][0] : spans[at + count - 1][1]])
            if name in answers or count == 1:
                found[answers.get(name, name)] = None
                at += count
                break
    return list(found)


# Rewards -----------------------------------------------------------------------------------------


def _build_rollout_example(
    name: str,
    answer: str | None,
    value: float,
    *,
    right: Sequence[Sequence[str]] = (("France",), ("United Kingdom", "UK")),
    any_of: bool = False,
    results: Sequence[str] = ("France",),
    reason: str | None = None,
    **options: Any,
) -> Example:
    return build_example(
        name,
        value,
        "" if answer is None else f"<think></think><answer>{answer}</answer>",
        reason=reason,
        options=options,
        problem={"answers": [list(names) for names in right], "any_of": any_of},
        turn="invalid" if answer is None else "answer",
        number=2,
        history=({"function": "get_tail_entities", "results": list(results)},),
    )


class _AnswerSetReward(Reward, ABC):
    """Compares the answer in the last turn with the right answers."""

    def score(self, sample: Sample) -> Score:
        right: Any = sample.problem.get("answers")
        answers = _index_answer_names(right)
        pieces = 1 + max(escape_text(name).count(",") for names in right for name in names)
        kind, text = read_turn(sample.response)
        named = parse_named_answers(text, answers, max(_PIECES, pieces)) if kind == "answer" else []
        if not named or len(named) > _MAX_NAMES:
            return Score(0.0, "no answer" if not named else "too many names")
        wanted = 1 if sample.problem.get("any_of") else len({*answers.values()})
        value = self._value(named, wanted)
        return Score(value, None if value == 1 else "wrong answer")

    @abstractmethod
    def _value(self, named: Sequence[int | str], wanted: int) -> float:
        """The value of the given names if `wanted` right ones are required."""


def _compute_f1(named: Sequence[int | str], wanted: int) -> float:
    """F1 of precision and recall; recall is at most 1."""
    hits = sum(isinstance(name, int) for name in named)
    if not hits:
        return 0.0
    precision, recall = hits / len(named), min(1.0, hits / wanted)
    return 2 * precision * recall / (precision + recall)


class EntityF1(_AnswerSetReward):
    """F1 of the entities named in an answer; with `any_of`, one right entity suffices.

    Several names of one entity count once. KG-R1's first metric counted its text and its id as two
    and gave a perfect answer 2/3.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_rollout_example("gold", " France, UK", 1.0),
        _build_rollout_example("half of it", " France", 2 / 3, reason="wrong answer"),
        _build_rollout_example("two names of one", " United Kingdom, UK", 2 / 3),
        _build_rollout_example("no answer", None, 0.0, reason="no answer"),
        _build_rollout_example(
            "all there is", ",".join(map(str, range(9_999))), 0.0, reason="too many names"
        ),
    )

    def _value(self, named: Sequence[int | str], wanted: int) -> float:
        return _compute_f1(named, wanted)


class KgExactMatch(_AnswerSetReward):
    """1 if an answer names all right entities and nothing else, else 0; see `mode`.

    If the problem accepts any right answer (`any_of`), the answer must name at least one right
    entity and nothing else.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_rollout_example("gold", " the united kingdom, France", 1.0),
        _build_rollout_example("half of it", " France", 0.0, reason="wrong answer"),
        _build_rollout_example("one of any", " UK", 1.0, any_of=True),
        _build_rollout_example("half of it, by F1", " France", 2 / 3, mode="f1"),
        _build_rollout_example("no answer", None, 0.0, reason="no answer"),
        _build_rollout_example("tags in it", " France</information><answer> UK", 0.0),
    )

    mode: Literal["em", "f1"] = "em"
    """`f1` computes entity F1 instead, as KG-R1's training does."""

    def _value(self, named: Sequence[int | str], wanted: int) -> float:
        value = _compute_f1(named, wanted)
        return value if self.mode == "f1" else float(value == 1.0)


class HitAt1(_AnswerSetReward):
    """1 if the first name in an answer is right, else 0."""

    examples: ClassVar[tuple[Example, ...]] = (
        _build_rollout_example("gold", " France, Spain", 1.0),
        _build_rollout_example("second", " Spain, France", 0.0, reason="wrong answer"),
        _build_rollout_example("no answer", None, 0.0, reason="no answer"),
    )

    def _value(self, named: Sequence[int | str], wanted: int) -> float:
        return float(isinstance(named[0], int))


class RetrievalQuality(Reward):
    """1 if the results of a query contained a right answer, whatever was answered, else 0.

    If a problem has `evidence` (names as in `answers`), the results must contain one of it instead.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_rollout_example("gold", " Spain", 1.0),
        _build_rollout_example(
            "not shown", " France", 0.0, results=["Spain"], reason="not retrieved"
        ),
        _build_rollout_example("a part of a word", " France", 0.0, results=["Francestan"]),
        _build_rollout_example(
            "a part of a word, as in KG-R1",
            " Spain",
            1.0,
            results=["Francestan"],
            match="substring",
        ),
    )

    match: Literal["exact", "substring"] = "exact"
    """`exact`: an entity of that name is among the results. `substring`: the name is a substring of
    any result, relations included; this is KG-R1's rule, which finds "us" in "house"."""

    def score(self, sample: Sample) -> Score:
        problem = sample.problem
        wanted = _index_answer_names(problem.get("evidence", problem.get("answers")))
        if self.match == "exact":
            found = any(
                normalize_name(name) in wanted for name in _list_query_results(sample, "_entities")
            )
        else:
            results = [normalize_name(name) for name in _list_query_results(sample, "")]
            found = any(name in result for result in results for name in wanted)
        return Score(float(found), None if found else "not retrieved")


def _list_query_results(sample: Sample, kind: str) -> Iterable[str]:
    """The results of queries by functions whose names end with `kind`; errors have no results."""
    for info in (*sample.history, sample.info):
        if str(info.get("function")).endswith(kind):
            yield from info.get("results", ())
