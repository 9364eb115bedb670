"""The rule reward of Countdown: the source design's semantics by default, safer ones by option.

The source is design 002 (after TinyZero). Where its code would hang, crash or leave an exception
uncaught, an answer that cannot be computed earns the format score. One case differs on purpose:
a complex value is refused even where its distance to the target happens to be small.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from rlx_plugins.countdown.expression import (
    MAX_DIGITS,
    Number,
    Numeric,
    Ops,
    evaluate_expression,
    evaluate_tokens,
    tokenize_expression,
)
from rlx_plugins.tags import last_block

__all__ = [
    "Extract",
    "Grade",
    "compute_grade_points",
    "compute_score",
    "evaluate_equation",
    "extract_solution",
    "grade_solution",
    "validate_equation",
    "verify_equation_strict",
]

Extract = Literal["seed", "last_block"]

TOLERANCE = 1e-5
"""How far a float64 value may lie from the target and still count as equal (the source's)."""

_MARKER = "Assistant:"
_runs_of_digits = re.compile(r"[0-9]+").findall


@dataclass(frozen=True, slots=True)
class Grade:
    """Where a response stands, and why.

    Attributes:
        level: "none" without an answer block, "format" with one that is not right, "right".
        reason: what is wrong; None when the answer is right.
    """

    level: Literal["none", "format", "right"]
    reason: str | None = None


_NO_BLOCK = Grade("none", "no answer block")
_WRONG_NUMBERS = Grade("format", "wrong numbers")
_WRONG_VALUE = Grade("format", "wrong value")
_EMPTY = Grade("format", "empty answer")
_DIVISION_BY_ZERO = Grade("format", "not computable: division by zero")
_OVERFLOW = Grade("format", "not computable: overflow")
_RIGHT = Grade("right")


def extract_solution(solution_str: str, extract: Extract = "seed") -> str | None:
    """Returns the text of the answer, stripped, or None where there is none.

    Args:
        solution_str: the response; with "seed", what precedes the first "Assistant:" is ignored.
        extract: "seed" looks at the last line only, so a line end after the answer loses it;
            "last_block" takes the last `<answer>…</answer>` wherever it is.
    """
    start = 0
    if extract == "seed":
        marker = solution_str.find(_MARKER)
        start = solution_str.rfind("\n") + 1
        if marker >= start:
            start = marker + len(_MARKER)
    answer = last_block(solution_str, "<answer>", "</answer>", start)
    return None if answer is None else answer.strip()


def validate_equation(
    equation: str, available_numbers: Sequence[float], *, use_all: bool = True
) -> bool:
    """Tells whether the runs of digits in an equation are the available numbers, each used once.

    Signs and decimal points do not count: `2.5` uses 2 and 5. With `use_all=False` some numbers
    may be left out.
    """
    runs = _runs_of_digits(equation)
    if len(runs) > len(available_numbers):
        return False
    if len(equation) > MAX_DIGITS and max(map(len, runs), default=0) > MAX_DIGITS:
        return False
    return _matches_available_numbers(list(map(int, runs)), available_numbers, use_all)


def _matches_available_numbers(used: list[int], available: Sequence[float], use_all: bool) -> bool:
    if use_all:
        return sorted(used) == sorted(available)
    return not Counter[float](used) - Counter[float](available)


def evaluate_equation(
    equation: str,
    *,
    ops: Ops = "seed",
    numeric: Numeric = "float64",
    allow_decimals: bool = True,
) -> Number | None:
    """Returns the value of an equation, or None where `expression.evaluate` refuses it."""
    try:
        return evaluate_expression(
            equation, ops=ops, numeric=numeric, allow_decimals=allow_decimals
        )
    except ArithmeticError:
        return None


def grade_solution(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extract: Extract = "seed",
    ops: Ops = "seed",
    numeric: Numeric = "float64",
    allow_decimals: bool = True,
    use_all: bool = True,
) -> Grade:
    """Judges a response. `compute_score` says what the arguments mean."""
    target, numbers = ground_truth["target"], ground_truth["numbers"]
    equation = extract_solution(solution_str, extract)
    if not equation:
        return _NO_BLOCK if equation is None else _EMPTY
    try:
        value, used = evaluate_tokens(
            tokenize_expression(equation, ops, allow_decimals), ops, numeric
        )
        if not _matches_available_numbers(used, numbers, use_all):
            return _WRONG_NUMBERS
        if numeric == "exact":
            return _RIGHT if _exactly_equal(value, target) else _WRONG_VALUE
        return _RIGHT if abs(value - target) < TOLERANCE else _WRONG_VALUE
    except ZeroDivisionError:
        return _DIVISION_BY_ZERO
    except OverflowError:
        return _OVERFLOW
    except ArithmeticError as error:
        return Grade("format", f"not computable: {error}")
    except TypeError as error:  # the ground truth is no number, and the source lets that pass
        return Grade("format", f"not comparable: {error}")


def _exactly_equal(value: Number, target: Any) -> bool:
    if isinstance(target, float):
        # Through its text, so that a target of 0.1 means one tenth.
        return math.isfinite(target) and Fraction(str(target)) == value
    return bool(value - target == 0)  # a target that is no number raises TypeError


def compute_score(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.1,
    score: float = 1.0,
    *,
    extract: Extract = "seed",
    ops: Ops = "seed",
    numeric: Numeric = "float64",
    allow_decimals: bool = True,
    use_all: bool = True,
) -> float:
    """Scores one response: 0 without an answer block, `format_score` with one, `score` if right.

    Like the source, it gives `format_score` where the ground truth is no number; the reward
    plugins check the ground truth first.

    Args:
        solution_str: what the model wrote, without the prompt: the prompt may hold an example
            in `<answer>` tags, which would be scored.
        ground_truth: `{"target": number, "numbers": [numbers]}`.
        method: unused, as in the source.
        extract: where the answer is looked for; see `extract_solution`.
        ops: "seed" also lets `**`, `//` and signs pass; "prompt" only what the prompt allows.
        numeric: "float64" with the source's absolute tolerance of 1e-5, or "exact" rationals.
        allow_decimals: whether digits may be joined to decimals such as `2.5`.
        use_all: whether every number must be used.
    """
    verdict = grade_solution(
        solution_str, ground_truth, extract, ops, numeric, allow_decimals, use_all
    )
    return compute_grade_points(verdict, format_score, score)


def compute_grade_points(verdict: Grade, format_score: float, score: float) -> float:
    """Returns what a grade is worth: 0, `format_score` or `score`."""
    if verdict.level == "none":
        return 0.0
    return score if verdict.level == "right" else format_score


def verify_equation_strict(
    solution_str: str, ground_truth: Mapping[str, Any], **options: Any
) -> bool:
    """Tells whether `compute_score`, with the same arguments, is exactly 1.0 for a right answer.

    Format credit never counts as correct, even where `format_score` is 1.
    """
    return compute_score(solution_str, ground_truth, **{**options, "format_score": 0.0}) == 1.0
