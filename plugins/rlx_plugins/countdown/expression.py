"""Evaluates untrusted arithmetic as Python would, without `eval`, `ast` or recursion."""

import math
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any, Literal

Number = int | float | Fraction
Numeric = Literal["float64", "exact"]
Ops = Literal["python", "prompt"]

MAX_DIGITS = 4300  # Python's limit for whole numbers
MAX_TOKENS = 5980  # Python's limit is a sum of 2990 terms
MAX_PENDING = 2980  # close to Python's limit of signs in a row
MAX_DEPTH = 200  # Python's limit for nested parentheses
MAX_POWER_BITS = 4096  # of the result of one `**`
MAX_BITS = 1 << 14  # of any intermediate whole number
MAX_WORK_BITS = 1 << 20  # of all large numbers of one expression together

_SIGNS = ("+", "-")
_LARGE = 1 << 64  # below this, arithmetic is too cheap to count

_token = re.compile(r"[^ \t\f0-9.*/]|[0-9.]+|\*\*?|//?")
_tokens = _token.findall
_decimal = re.compile(r"[0-9]+\.[0-9]*|\.[0-9]+").fullmatch


class UncomputableError(ArithmeticError):
    """The text has no finite real value computable within the limits."""


def evaluate_expression(
    text: str,
    *,
    ops: Ops = "python",
    numeric: Numeric = "float64",
    allow_decimals: bool = True,
) -> Number:
    """Returns the finite value of an arithmetic expression.

    Args:
        text: digits, `.`, `+ - * / // **`, parentheses and ASCII white space; line ends are
            allowed only around the whole expression and inside parentheses.
        ops: "python" allows all of these; "prompt" allows only binary `+ - * /`, and no signs.
        numeric: "float64" computes as Python does; "exact" computes with rationals.
        allow_decimals: whether `2.5` is a number.

    Raises:
        ArithmeticError: any other text (`UncomputableError`), division by zero, or overflow.
    """
    text = text.strip(" \t\f\r\n")
    if not text:
        raise UncomputableError("it is empty")
    value, _ = evaluate_tokens(tokenize_expression(text, ops, allow_decimals), ops, numeric)
    if isinstance(value, float) and not math.isfinite(value):
        raise UncomputableError("overflow")
    return value


def tokenize_expression(text: str, ops: Ops, allow_decimals: bool) -> list[str]:
    """Splits an expression into numbers, operators, parentheses, line ends, and an end marker.
    Other characters become tokens too, which `evaluate_tokens` rejects."""
    if not allow_decimals and "." in text:
        raise UncomputableError("decimal number")
    if ops == "prompt" and ("**" in text or "//" in text):
        raise UncomputableError("operator outside + - * /")
    if len(text) > MAX_TOKENS and any(islice(_token.finditer(text), MAX_TOKENS, None)):
        raise UncomputableError("too long")
    tokens = _tokens(text)
    tokens.append(_END)
    return tokens


def evaluate_tokens(tokens: Sequence[str], ops: Ops, numeric: Numeric) -> tuple[Number, list[int]]:
    """Returns the value of the tokens of `tokenize_expression`, and all runs of digits as numbers.

    Floats may overflow to a value that is close to no target. The shunting-yard algorithm: an
    operator waits with its left operand until its right one is complete. The last that waits is in
    `level`, `function` and `left`, the earlier ones in `pending`.
    """
    prefix, infix = _PREFIX[ops], _INFIX[numeric]
    pending: list[tuple[int, Callable[..., Any], Any]] = []
    digits: list[int] = []
    level, _, function = _OPEN
    left: Any = None
    right: Any = None
    depth = work = 0
    operand_next = True
    for token in tokens:
        if operand_next:
            found = prefix.get(token)
            if type(found) is int:
                right = found
                digits.append(found)
                operand_next = False
            elif found:
                pending.append((level, function, left))
                level, _, function = found
                depth += token == "("
                if depth > MAX_DEPTH or len(pending) > MAX_PENDING:
                    raise UncomputableError("too deep")
            elif token[0] in "0123456789.":
                right = _parse_number_token(token, numeric)
                digits += map(int, filter(None, token.split(".")))
                operand_next = False
            elif token in _SIGNS:
                raise UncomputableError("a sign before a number")
            else:
                _skip_line_end(token, depth, "an operand is missing")
        elif operation := infix.get(token):
            binding, finishes, operate = operation
            while level >= finishes:
                right = function(left, right)
                level, function, left = pending.pop()
                kind = type(right)
                if kind is not float and not (kind is int and -_LARGE < right < _LARGE):
                    work += _compute_bit_size(right)
                    if work > MAX_WORK_BITS:
                        raise UncomputableError("too much work")
            if binding:
                pending.append((level, function, left))
                level, function, left = binding, operate, right
                operand_next = True
            elif (token == ")") == (depth == 0):
                raise UncomputableError("unbalanced parentheses")
            elif depth:
                level, function, left = pending.pop()
                depth -= 1
        else:
            _skip_line_end(token, depth, "two values without an operator between them")
    return right, digits


def _skip_line_end(token: str, depth: int, otherwise: str) -> None:
    """Skips a line end inside parentheses; raises UncomputableError for anything else."""
    if token in "\r\n":
        if depth == 0:
            raise UncomputableError("line end outside parentheses")
    elif token == _END or token[0] in "0123456789.+-*/()":
        raise UncomputableError(otherwise)
    else:
        raise UncomputableError("it holds what is no arithmetic")


def _parse_number_token(token: str, numeric: Numeric) -> Number:
    if len(token) > MAX_DIGITS:
        raise UncomputableError("number too long")
    if "." not in token:
        if token[0] == "0" and token.strip("0"):
            raise UncomputableError("whole number with a leading zero")
        return int(token)
    if not _decimal(token):
        raise UncomputableError("stray decimal point")
    return Fraction(token) if numeric == "exact" else float(token)


def _compute_bit_size(value: Number) -> int:
    if isinstance(value, float):
        return 0
    bits = value.numerator.bit_length() + value.denominator.bit_length()
    if bits > MAX_BITS:
        raise UncomputableError("number too large")
    return bits


def _compute_power(base: Any, exponent: Any) -> Any:
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
    return _simplify_fraction(Fraction(base) ** int(exponent))


def _exact_divide(left: Any, right: Any) -> Number:
    if type(left) is int and type(right) is int:  # the usual case, and much faster
        quotient, rest = divmod(left, right)
        return Fraction(left, right) if rest else quotient
    return _simplify_fraction(Fraction(left) / right)


def _check_power(bits: int, exponent: int | Fraction) -> None:
    if bits * exponent > MAX_POWER_BITS:
        raise UncomputableError("power too large")


def _simplify_fraction(value: Fraction) -> Number:
    return value.numerator if value.denominator == 1 else value


def _apply_plus_sign(_: None, right: Any) -> Any:
    return right


# (precedence, lowest precedence of waiting operators applied before it, function). A precedence of
# 0 marks closing tokens. `**` applies nothing before it, so it is right-associative and binds more
# tightly than a sign.
_Operation = tuple[int, int, Callable[..., Any]]
_END = "end"
_OPEN: _Operation = (0, 0, _apply_plus_sign)
_FLOAT: dict[str, _Operation] = {
    "+": (1, 1, operator.add),
    "-": (1, 1, operator.sub),
    "*": (2, 2, operator.mul),
    "/": (2, 2, operator.truediv),
    "//": (2, 2, operator.floordiv),
    "**": (4, 5, _compute_power),
    ")": (0, 1, _apply_plus_sign),
    _END: (0, 1, _apply_plus_sign),
}
_INFIX: dict[Numeric, dict[str, _Operation]] = {
    "float64": _FLOAT,
    "exact": _FLOAT | {"/": (2, 2, _exact_divide), "**": (4, 5, _exact_power)},
}
# Tokens that may begin an operand. Looking up small numbers is faster than calling `int`.
_PROMPT: dict[str, int | _Operation] = {str(number): number for number in range(1_000)}
_PROMPT["("] = _OPEN
_PREFIX = {
    "prompt": _PROMPT,
    "python": _PROMPT | {"-": (3, 0, lambda _, right: -right), "+": (3, 0, _apply_plus_sign)},
}
