"""Accuracy rewards that compare a turn's answer with the known ones of its problem, as text."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, ClassVar, Literal

from rlx.plugin import Example, Reward, Sample, Score
from rlx_plugins.answer_text import normalize_answer, parse_number
from rlx_plugins.examples import build_example

_result = re.compile(r"(?:\A|\n)[ \t]*####[ \t]*(\S[^\n]*)\Z")
"""The last line of a worked solution in the form of GSM8K."""


def build_answer_example(
    name: str, answer: str, right: Any, value: float, **options: Any
) -> Example:
    """An example of a reward that compares the span `answer` with the field `answer`."""
    problem, spans = {"answer": right}, {"answer": answer}
    return build_example(name, value, options=options, problem=problem, spans=spans)


class SpanReward(Reward):
    """Base of rewards that read one span of a turn."""

    span: str | None = None
    """The span to read; null for the whole response."""

    def spans_read(self) -> Sequence[str]:
        return () if self.span is None else (self.span,)

    def read_span(self, sample: Sample) -> str:
        """The text without white space around it; "" without one."""
        text = sample.response if self.span is None else sample.spans.get(self.span, "")
        return text.strip()


class AnswerReward(SpanReward):
    """Base of rewards that compare one span of a turn with one field of its problem."""

    span: str | None = "answer"
    """The span to read; null for the whole response."""
    field: str = "answer"
    """The problem's field that holds the right answer: text, a number, or a list of them. Of a text
    whose last line begins with `####`, as in GSM8K, it is the rest of that line."""

    def check_problem(self, problem: Mapping[str, Any]) -> None:
        self.list_right_answers(problem)

    def list_right_answers(self, problem: Mapping[str, Any]) -> tuple[str | int | float, ...]:
        """The right answers, texts and numbers; raises ValueError where the data have none."""
        if self.field not in problem:
            there = ", ".join(map(repr, problem)) or "none"
            raise ValueError(f"there is no field {self.field!r}; the problem has {there}")
        value: Any = problem[self.field]
        values: list[Any] | tuple[Any, ...] = value if isinstance(value, list | tuple) else [value]
        if not values or not all(map(_is_answer, values)):
            raise ValueError(f"the field {self.field!r} must hold text or numbers, got {value!r}")
        texts = [one.strip() if isinstance(one, str) else one for one in values]
        return tuple(
            found[1] if isinstance(one, str) and (found := _result.search(one)) else one
            for one in texts
        )


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, int | float) and not isinstance(value, bool)


class AnswerExactMatch(AnswerReward):
    """1 if the answer equals a right one exactly, ignoring surrounding white space, else 0.

    A right answer that is a number in the data equals every way to write it: `72`, `72.0`, `7.2e1`.
    `normalize: text` compares texts as in question answering (SQuAD, HotpotQA), ignoring case,
    punctuation and articles, but not what belongs to a number.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        build_answer_example("gold", " Paris\n", "Paris", 1.0),
        build_answer_example("another case", "paris", "Paris", 0.0),
        build_answer_example("one of several", "7", [7, "seven"], 1.0),
        build_answer_example("a worked solution", "72", "48 + 24 = 72\n#### 72", 1.0),
        build_answer_example(
            "normalised", "The  answer: U.S.A.!", "answer usa", 1.0, normalize="text"
        ),
        build_answer_example("a point in a number", "314", "3.14", 0.0, normalize="text"),
    )

    normalize: Literal["none", "text"] = "none"

    def score(self, sample: Sample) -> Score:
        right = self.list_right_answers(sample.problem)
        answer = self.read_span(sample)
        if not answer:
            return Score(0.0, "no answer")
        for one in right:
            if not isinstance(one, str):
                same = parse_number(answer) == Decimal(repr(one))
            elif self.normalize == "text":
                same = normalize_answer(answer) == normalize_answer(one)
            else:
                same = answer == one
            if same:
                return Score(1.0)
        return Score(0.0, "wrong answer")
