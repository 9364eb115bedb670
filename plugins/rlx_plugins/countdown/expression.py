"""Evaluates arithmetic written by a model, as Python would, without `eval`, `ast` or recursion.

The text is untrusted. Every call ends in milliseconds and either gives a number or says why not.
Precedence, associativity and the mix of ints and floats are Python's. The limits lie at or near
those of CPython 3.11, except the size of whole numbers, where Python would go on for hours, and
complex values, which are refused.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal

__all__ = ["Number", "Numeric", "Ops", "UncomputableError", "compute", "evaluate", "tokenize"]

Number = int | float | Fraction
Numeric = Literal["float64", "exact"]
Ops = Literal["seed", "prompt"]

MAX_DIGITS = 4300  # Python reads no longer whole number,
MAX_TOKENS = 5980  # no sum of more than 2990 terms,
MAX_PENDING = 2980  # not many more signs in a row than this,
MAX_DEPTH = 200  # and no deeper parentheses.
MAX_POWER_BITS = 4096  # of the result of one `**`
MAX_BITS = 1 << 14  # of any whole number on the way
MAX_WORK_BITS = 1 << 20  # of all large numbers of one expression together

_LARGE = 1 << 64  # below this, arithmetic is too cheap to count
_SMALL = {str(number): number for number in range(10_000)}  # faster than `int`

_allowed = re.compile(r"[0-9+\-*/(). \t\f\r\n]+").fullmatch
_tokens = re.compile(r"[0-9.]+|\*\*|//|[-+*/()\r\n]").findall
_decimal = re.compile(r"[0-9]+\.[0-9]*|\.[0-9]+").fullmatch


class UncomputableError(ArithmeticError):
    """The text has no finite real value that can be computed within the limits."""


def evaluate(
    text: str,
    *,
    ops: Ops = "seed",
    numeric: Numeric = "float64",
    allow_decimals: bool = True,
) -> Number:
    """Returns the finite value of an arithmetic expression.

    Args:
        text: digits, `.`, `+ - * / // **`, parentheses and ASCII white space; line ends count as
            white space inside parentheses only.
        ops: "seed" takes all of these; "prompt" takes binary `+ - * /` only, and no signs.
        numeric: "float64" computes as Python does; "exact" computes with rationals.
        allow_decimals: whether `2.5` is a number.

    Raises:
        ArithmeticError: anything else (`UncomputableError`), division by zero, or overflow.
    """
    return compute(tokenize(text, ops, allow_decimals), ops, numeric)[0]


def tokenize(text: str, ops: Ops, allow_decimals: bool) -> list[str]:
    """Splits an expression into numbers, operators, parentheses, line ends, and an end mark.

    Raises:
        UncomputableError: a character or an operator that is not allowed, or too many tokens.
    """
    if not _allowed(text):
        raise UncomputableError("it holds what is no arithmetic" if text else "it is empty")
    if not allow_decimals and "." in text:
        raise UncomputableError("decimal number")
    if ops == "prompt" and ("**" in text or "//" in text):
        raise UncomputableError("operator outside + - * /")
    tokens = _tokens(text)
    if len(tokens) > MAX_TOKENS:
        raise UncomputableError("too long")
    tokens.append(_END)
    return tokens


def compute(tokens: Sequence[str], ops: Ops, numeric: Numeric) -> tuple[Number, list[int]]:
    """Returns the finite value of what `tokenize` gave, and every run of digits in it as a number.

    Shunting-yard: operands on one stack, operators that await their right side on another.
    Raises as `evaluate` does.
    """
    small, infix = _SMALL, _EXACT if numeric == "exact" else _FLOAT
    free = 0 if numeric == "exact" else _LARGE  # size below which a result is not counted as work
    values: list[Any] = []
    digits: list[int] = []
    pending = [_OPEN]
    depth = work = 0
    operand_next = True
    for token in tokens:
        if operand_next:
            number = small.get(token)
            if number is not None:
                values.append(number)
                digits.append(number)
                operand_next = False
            elif token[0] in "0123456789.":
                values.append(_literal(token, numeric))
                digits.extend(int(run) for run in token.split(".") if run)
                operand_next = False
            elif token in "\r\n":
                _only_inside(depth)
            else:
                pending.append(_prefix(token, ops))
                depth += token == "("
                if depth > MAX_DEPTH or len(pending) > MAX_PENDING:
                    raise UncomputableError("too deep")
        elif operation := infix.get(token):
            binding, finishes, _ = operation
            while pending[-1][0] >= finishes:
                level, _, function = pending.pop()
                right = values.pop()
                value = function(right) if level == _SIGN else function(values.pop(), right)
                if not -free < value < free:
                    work += _size(value)
                    if work > MAX_WORK_BITS:
                        raise UncomputableError("too much work")
                values.append(value)
            if binding:
                pending.append(operation)
                operand_next = True
            elif (token == ")") == (depth == 0):
                raise UncomputableError("unbalanced parentheses")
            else:
                pending.pop()
                depth -= 1
        elif token in "\r\n":
            _only_inside(depth)
        else:
            raise UncomputableError("two values without an operator between them")
    return _finite(values[0]), digits


def _finite(value: Number) -> Number:
    if isinstance(value, float) and not math.isfinite(value):
        raise UncomputableError("overflow")
    return value


def _literal(token: str, numeric: Numeric) -> Number:
    if len(token) > MAX_DIGITS:
        raise UncomputableError("number too long")
    if token.isdigit():
        if token[0] == "0" and token.strip("0"):
            raise UncomputableError("whole number with a leading zero")
        return int(token)
    if not _decimal(token):
        raise UncomputableError("stray decimal point")
    return Fraction(token) if numeric == "exact" else float(token)


def _prefix(token: str, ops: Ops) -> "_Operation":
    if token == "(":
        return _OPEN
    if ops == "seed" and token in _SIGNS:
        return _SIGNS[token]
    raise UncomputableError("an operand is missing")


def _only_inside(depth: int) -> None:
    if depth == 0:
        raise UncomputableError("line end outside parentheses")


def _size(value: Number) -> int:
    """Bits of a number that costs more than a machine word; 0 for floats."""
    if isinstance(value, float):
        return 0
    bits = value.numerator.bit_length() + value.denominator.bit_length()
    if bits > MAX_BITS:
        raise UncomputableError("number too large")
    return bits


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int):
        _check_power(base.bit_length() if abs(base) > 1 else 0, exponent)
    value = base**exponent
    if isinstance(value, complex):
        raise UncomputableError("complex value")
    return value


def _exact_power(base: Any, exponent: Any) -> Number:
    if exponent.denominator != 1:
        raise UncomputableError("root, which has no exact value")
    size = max(abs(base.numerator), base.denominator)
    _check_power(size.bit_length() if size > 1 else 0, abs(exponent))
    return _whole(Fraction(base) ** int(exponent))


def _exact_divide(left: Any, right: Any) -> Number:
    return _whole(Fraction(left) / right)


def _check_power(bits: int, exponent: int | Fraction) -> None:
    if bits * exponent > MAX_POWER_BITS:
        raise UncomputableError("power too large")


def _whole(value: Fraction) -> Number:
    return value.numerator if value.denominator == 1 else value


# (how tightly it binds, what it lets finish before it, its function); one that binds at 0 only
# closes. `**` lets nothing finish, so it groups to the right, and a sign waits for it.
_Operation = tuple[int, int, Callable[..., Any]]
_SIGN = 3
_END = "end"
_OPEN: _Operation = (0, 0, _whole)
_SIGNS: dict[str, _Operation] = {
    "-": (_SIGN, 0, operator.neg),
    "+": (_SIGN, 0, operator.pos),
}
_FLOAT: dict[str, _Operation] = {
    "+": (1, 1, operator.add),
    "-": (1, 1, operator.sub),
    "*": (2, 2, operator.mul),
    "/": (2, 2, operator.truediv),
    "//": (2, 2, operator.floordiv),
    "**": (4, 5, _power),
    ")": (0, 1, _whole),
    _END: (0, 1, _whole),
}
_EXACT: dict[str, _Operation] = _FLOAT | {"/": (2, 2, _exact_divide), "**": (4, 5, _exact_power)}
