"""The scorers of reasoning-gym's datasets, without their two faults.

Some run the answer as code: they give it to `eval`, or to sympy's `parse_expr`, which evaluates
Python as well. Others pay in full for answers that solve nothing. An answer is text of the model,
so it is read here before such a scorer may see it, and a full score of such a scorer is confirmed.
"""

import ast
import math
import re
import string
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from importlib import import_module
from typing import Any

__all__ = ["is_readable", "score_entry"]

Entry = Mapping[str, Any]

_EVALUATED_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Their scorers give the answer to `eval`, to read a list."""
_PARSED_FORMULAS = frozenset(
    {"intermediate_integration", "polynomial_multiplication", "simple_integration"}
)
_PARSED_ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Their scorers give the answer to `parse_expr`, as those of `_PARSED_FORMULAS`."""

_is_arithmetic = re.compile(r"[0-9+\-*/()\s]+", re.ASCII).fullmatch
_formula_token = re.compile(
    r"(?P<name>[A-Za-z_]\w*)|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[-+*/^(),\s]", re.ASCII
)
_NAMES = frozenset(string.ascii_lowercase) | {"C", "E", "I"}
_FUNCTIONS = frozenset(
    {"Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "pi", "sec"}
    | {"sin", "sinh", "sqrt", "tan", "tanh"}
)


def is_readable(dataset: str, answer: str, entry: Entry) -> bool:
    """Whether the dataset's scorer may read an answer: where it runs code, only plain mathematics.

    A formula consists of numbers, operators, variables of one letter, elementary functions, and the
    names in the stored answer. Calculus such as `Integral(x, x)` would state the problem again.
    """
    if dataset in _PARSED_ARITHMETIC:
        return _is_arithmetic(answer) is not None
    if dataset in _PARSED_FORMULAS:
        known = _NAMES | _FUNCTIONS | set(re.findall(r"[A-Za-z]\w*", str(entry["answer"])))
        return _find_names(answer) <= known
    return True


def score_entry(dataset: str, scorer: Any, answer: str, entry: Entry) -> float:
    """The score of a readable answer; 0 for a full score that `answer` does not deserve.

    Args:
        dataset: name of the dataset.
        scorer: the dataset itself.
        answer: the model's answer, for which `is_readable`.
        entry: the dataset's entry.
    """
    if dataset in _EVALUATED_LITERALS:
        vars(sys.modules[type(scorer).__module__])["eval"] = ast.literal_eval
    value = float(scorer.score_answer(answer, entry))
    confirm = _CONFIRMATIONS.get(dataset)
    return 0.0 if value == 1.0 and confirm is not None and not confirm(answer, entry) else value


def _find_names(formula: str) -> set[str]:
    """The names in a formula; {formula} itself if it is none."""
    names, end = set(), 0
    for token in _formula_token.finditer(formula):
        if token.start() != end:
            break
        end = token.end()
        if token["name"]:
            names.add(token["name"])
    return names if end == len(formula) else {formula}


def _reaches(target: int, answer: str, entry: Entry) -> bool:
    """Whether an arithmetic answer uses the entry's numbers, each once, and is the target."""
    used = sorted(map(int, re.findall(r"[0-9]+", answer)))
    value = import_module("sympy").parse_expr(answer)
    return used == sorted(entry["metadata"]["numbers"]) and bool(value == target)


def _is_probability(answer: str, entry: Entry) -> bool:
    given, right = (float(Fraction(text.replace(",", ""))) for text in (answer, entry["answer"]))
    return math.isclose(given, right, rel_tol=1e-3)


_CONFIRMATIONS: Mapping[str, Callable[[str, Entry], bool]] = {
    # A value near the target is paid, and one that rounds down to it.
    "countdown": lambda answer, entry: _reaches(entry["metadata"]["target"], answer, entry),
    # Any four numbers in range are paid.
    "puzzle24": lambda answer, entry: _reaches(24, answer, entry),
    # 0 is paid for every probability, as a prefix of its digits.
    "coin_flip": _is_probability,
    # The distance of nan is paid as 0.
    "complex_arithmetic": lambda answer, _: "nan" not in answer.lower(),
    # Any text is paid.
    "game_of_life_halting": lambda answer, entry: answer == str(entry["answer"]),
}
