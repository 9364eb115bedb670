"""Decides whether an answer solves a Countdown problem, independently of the reward.

It reads the answer with Python's own parser and computes with rationals, by recursion. The reward
has a parser of its own, so that a mistake in one is not in the other. Hostile text may take long,
which the reward never does.
"""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_MAX_ANSWER_CHARACTERS = 4096  # characters
_LARGEST_DENOMINATOR = 10**6
_ROUNDING = Fraction(5, 10**13)

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def solves_problem(answer: str, problem: Mapping[str, Any]) -> bool:
    """Whether an expression reaches exactly `target` with the whole `numbers`, each used once.

    It has the operators that prompts offer, `+ - * /`, and signs.
    """
    if len(answer) > _MAX_ANSWER_CHARACTERS:
        return False
    used: Counter[Fraction] = Counter()
    try:
        value = _evaluate_node(ast.parse(answer.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return False
    numbers = Counter(Fraction(str(number)) for number in problem["numbers"])
    return used == numbers and _reaches_target(value, problem["target"])


def _reaches_target(value: Fraction, target: float) -> bool:
    """Whether a value is the target, or the simple fraction that a target with decimals rounds."""
    written = Fraction(str(target))
    if written.denominator == 1 or value == written:
        return value == written
    simple = value == value.limit_denominator(_LARGEST_DENOMINATOR)
    return simple and abs(value - written) < _ROUNDING * max(Fraction(1), abs(written))


def _evaluate_node(node: ast.expr, used: Counter[Fraction]) -> Fraction:
    """The value of a node; counts its numbers in `used`.

    Raises:
        ValueError: it is no arithmetic on whole numbers, or too large.
        ArithmeticError: division by zero.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[Fraction(node.value)] += 1
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluate_node(node.operand, used)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _evaluate_node(node.left, used), _evaluate_node(node.right, used)
        if type(node.op) in _BINARY:
            return Fraction(_BINARY[type(node.op)](left, right))
    raise ValueError("no arithmetic on whole numbers")
