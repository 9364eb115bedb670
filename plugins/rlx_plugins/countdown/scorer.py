"""The rule-based reward of Countdown: TinyZero's format and levels, with exact arithmetic."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from rlx.plugin import get_last_block
from rlx_plugins.countdown.expression import (
    MAX_DIGITS,
    Number,
    Numeric,
    Ops,
    evaluate_expression,
    evaluate_tokens,
    tokenize_expression,
)

Extract = Literal["last_line", "last_block"]

TOLERANCE = 1e-5
"""Absolute tolerance at which a float64 value equals the target, as in TinyZero."""

MAX_DENOMINATOR = 10**6
"""Of a fraction that a target with decimals can stand for."""
MAX_ROUNDING = 5e-13
"""Relative distance of such a target, computed in floats, from its fraction. Two different
fractions with these denominators are at least 1e-12 apart."""

_MARKER = "Assistant:"
_runs_of_digits = re.compile(r"[0-9]+").findall


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a response, and what is wrong with it, if anything is."""

    level: Literal["none", "format", "right"]
    reason: str | None = None

    def get_points(self, format_score: float, score: float) -> float:
        return {"none": 0.0, "format": format_score, "right": score}[self.level]


_WRONG_NUMBERS = Grade("format", "wrong numbers")
_WRONG_VALUE = Grade("format", "wrong value")
_RIGHT = Grade("right")


def extract_solution(solution_str: str, extract: Extract = "last_line") -> str | None:
    """Returns the stripped text of the answer, or None if there is none.

    "last_line" searches only the last line and after the first "Assistant:", as TinyZero, so it
    misses an answer followed by a line end; "last_block" takes the last block anywhere.
    """
    start = 0
    if extract == "last_line":
        start = max(solution_str.find(_MARKER), solution_str.rfind("\n"), 0)
    answer = get_last_block(solution_str, "<answer>", "</answer>", start)
    return None if answer is None else answer.strip()


def validate_equation(equation: str, available_numbers: Sequence[float]) -> bool:
    """Whether the runs of digits in an equation are the available numbers, each used once."""
    runs = _runs_of_digits(equation)
    if len(runs) != len(available_numbers) or any(len(run) > MAX_DIGITS for run in runs):
        return False
    return sorted(map(int, runs)) == sorted(available_numbers)


def evaluate_equation(
    equation: str,
    *,
    ops: Ops = "python",
    numeric: Numeric = "float64",
    allow_decimals: bool = True,
) -> Number | None:
    """Returns the value of an equation, or None if `evaluate_expression` rejects it."""
    try:
        return evaluate_expression(
            equation, ops=ops, numeric=numeric, allow_decimals=allow_decimals
        )
    except ArithmeticError:
        return None


def grade_solution(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extract: Extract = "last_line",
    ops: Ops = "python",
    allow_decimals: bool = False,
) -> Grade:
    """Grades a response; see `compute_score` for the arguments."""
    target, numbers = ground_truth["target"], ground_truth["numbers"]
    equation = extract_solution(solution_str, extract)
    if equation is None:
        return Grade("none", "no answer block")
    if not equation:
        return Grade("format", "empty answer")
    try:
        tokens = tokenize_expression(equation, ops, allow_decimals=True)
        value, used = evaluate_tokens(tokens, ops, "float64" if allow_decimals else "exact")
        if sorted(used) != sorted(numbers):
            return _WRONG_NUMBERS
        if allow_decimals:
            is_right = abs(value - target) < TOLERANCE
        else:
            is_right = _exactly_equal(value, target)
        # Last, so that other answers have the same reason by either rule.
        if is_right and "." in equation and not allow_decimals:
            return Grade("format", "decimal number")
        return _RIGHT if is_right else _WRONG_VALUE
    except ZeroDivisionError:
        return Grade("format", "not computable: division by zero")
    except OverflowError:
        return Grade("format", "not computable: overflow")
    except ArithmeticError as error:
        return Grade("format", f"not computable: {error}")
    except TypeError as error:  # the target is not a number, which TinyZero accepts
        return Grade("format", f"not comparable: {error}")


def _exactly_equal(value: Number, target: Any) -> bool:
    """Whether a value is the target. A float is the rounding of some fraction: 0.3333333333333333
    is one third. A bound on the denominator keeps out values that are merely close."""
    if not isinstance(target, float):
        return bool(value - target == 0)  # raises TypeError if the target is not a number
    if not math.isfinite(target):
        return False
    if value == Fraction(str(target)):
        return True
    is_simple = isinstance(value, Fraction) and value.denominator <= MAX_DENOMINATOR
    rounding = MAX_ROUNDING * max(1.0, abs(target))
    return is_simple and not target.is_integer() and abs(float(value) - target) < rounding


def compute_score(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.1,
    score: float = 1.0,
    *,
    extract: Extract = "last_line",
    ops: Ops = "python",
    allow_decimals: bool = False,
) -> float:
    """Scores one response: 0 without an answer block, `format_score` with one, `score` if right.

    Args:
        solution_str: the response without the prompt, whose `<answer>` tags would be scored.
        ground_truth: `{"target": number, "numbers": [numbers]}`.
        method: unused, as in TinyZero.
        extract: see `extract_solution`.
        ops: see `evaluate_expression`.
        allow_decimals: TinyZero's own rule: `2.5` is a number and uses 2 and 5, and values are
            floats with a tolerance of 1e-5. Otherwise values are exact rationals.
    """
    verdict = grade_solution(solution_str, ground_truth, extract, ops, allow_decimals)
    return verdict.get_points(format_score, score)


def verify_equation_strict(
    solution_str: str, target_val: float, allowed_nums: Sequence[float]
) -> bool:
    """Whether an answer is right by TinyZero's own rule, as the source's probe asks (002, 2.2).
    Input that cannot be scored is not right. The reward `countdown.verify` is stricter."""
    ground_truth = {"target": target_val, "numbers": allowed_nums}
    try:
        return compute_score(solution_str, ground_truth, allow_decimals=True) == 1.0
    except (AttributeError, TypeError, ValueError):
        return False
