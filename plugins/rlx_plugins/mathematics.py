"""The accuracy reward that compares with known answers as mathematics, by math-verify.

Its grammar reads one formula, and here it must read all of it: what it would skip, such as the end
of `7+`, makes a text unreadable. What it does not read at all is read here first: the last box,
units and percent signs, numbers with an exponent or a base, and equations that name a value.
"""

import logging
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from rlx.plugin import Example, Sample, Score
from rlx_plugins.answer_text import format_number
from rlx_plugins.answers import AnswerReward, build_answer_example
from rlx_plugins.limited_call import call_with_limit

_DIGITS = 6
"""Number of decimals, and of significant digits, in which two numbers must agree."""
_MAX_CHARACTERS = 2000
"""Of a formula; a longer one is wrong."""
_SECONDS = 1.0
"""Processor time of one comparison, well below the deadline of a reward."""


class MathVerify(AnswerReward):
    """1 if the answer is mathematically equal to a right one, else 0; uses math-verify.

    Of an answer with a `\\boxed` the last box is read, otherwise the last formula between `$`,
    `\\(` or `\\[`; a span without any is one formula. A unit of the right answer must be in the
    answer too, `20\\%` is a fifth, and an answer that is not read to its end is wrong. Answers
    such as `9**9**9` would take hours to compute, so each comparison runs in its own process with
    a time limit; an answer that exceeds it is wrong.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        build_answer_example("gold", "72", "72", 1.0),
        build_answer_example("another form", r"$\frac{2}{4}$", 0.5, 1.0),
        build_answer_example("wrong", "71", "72", 0.0),
        build_answer_example("one of several", "x^2+2x+1", ["(x+1)^2", "x"], 1.0),
        build_answer_example("computed for hours", "9**9**9", "72", 0.0),
        build_answer_example("not mathematics", "???", "72", 0.0),
        build_answer_example("cut off", "72+", "72", 0.0),
        build_answer_example("another unit", "5 m", "5 km", 0.0),
    )

    def __setstate__(self, state: dict[Any, Any]) -> None:
        # Runs in a worker: the import must not count against the first sample's deadline.
        super().__setstate__(state)
        _import_math_verify()

    def check(self) -> None:
        if not _is_installed():
            raise ImportError(_MISSING)

    def check_problem(self, problem: Mapping[str, Any]) -> None:
        """Requires a right answer. Reads one that does not look like mathematics: to read all would
        take minutes."""
        for one in self.list_right_answers(problem):
            if isinstance(one, str) and _foreign.search(_command.sub("", one)) and _is_installed():
                _read_right_answer(one)

    def score(self, sample: Sample) -> Score:
        right = [
            one if isinstance(one, str) else format_number(one)
            for one in self.list_right_answers(sample.problem)
        ]
        answer = self.read_span(sample)
        if not answer:
            return Score(0.0, "no answer")
        formula = find_formula(answer, whole=self.span is not None)
        if formula is None:
            return Score(0.0, "unreadable")
        if len(formula) > _MAX_CHARACTERS:
            return Score(0.0, f"longer than {_MAX_CHARACTERS} characters")
        values = [value for one in right for value in _read_right_answer(one)]
        result = call_with_limit(lambda: _find_fault(values, formula), _SECONDS)
        if result.is_raised:
            raise RuntimeError(f"math-verify failed on an answer: {result.fault}")
        reason = result.value if result.fault is None else f"not compared: {result.fault}"
        return Score(float(reason is None), reason)


def _find_fault(right: "list[_Value]", formula: str) -> str | None:
    """What is wrong with an answer's formula; None if it has one of the right values."""
    found = list(_read_values(formula))
    if any(_are_equal(one, value) for value in found for one in right):
        return None
    return "wrong answer" if found else "unreadable"


def _is_installed() -> bool:
    return find_spec("math_verify") is not None


_command = re.compile(r"\\(?:text|textrm|mathrm|mbox|operatorname)\{[^{}]*\}|\\[A-Za-z]+")
_foreign = re.compile(r"[A-Za-z]{2,}[,.;:]?\s+[A-Za-z]{2,}|[?#@\"]")
"""Two words in a row, apart from what LaTeX writes as text, or signs that no formula has."""


# The formula of an answer ------------------------------------------------------------------------

_box = re.compile(r"\\(?:boxed|fbox)\s*\{")
_delimiter = re.compile(r"\\\$|\$\$?|\\[()\[\]]")
_CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_last_number = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")


def find_formula(text: str, *, whole: bool) -> str | None:
    """Finds the formula that an answer gives: its last box, or its last formula.

    A text without either is one formula if `whole`; otherwise its last number is. None if the last
    box is not closed, or if there is no formula.
    """
    boxes = list(_box.finditer(text))
    if boxes:
        return _find_closed_group(text, boxes[-1].end())
    formula = _find_last_formula(text)
    if formula is not None:
        return formula
    if whole:
        return text
    numbers = _last_number.findall(text)
    return numbers[-1] if numbers else None


def _find_last_formula(text: str) -> str | None:
    opened: re.Match[str] | None = None
    found: str | None = None
    for mark in _delimiter.finditer(text):
        if opened is None:
            opened = mark if mark[0] in _CLOSING else None
        elif mark[0] == _CLOSING[opened[0]]:
            found = text[opened.end() : mark.start()].strip() or found
            opened = None
    return found


def _find_closed_group(text: str, start: int) -> str | None:
    depth = 1
    for mark in re.finditer(r"\\[{}]|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return text[start : start + mark.start()]
    return None


# The values of a formula -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Value:
    """A way to read a formula: the text, its expression of SymPy, and its unit, if it has one."""

    formula: str
    expression: Any
    unit: str = ""


_LATEX = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty "}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_superscript = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_root_sign = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-z]))")
_spaces = re.compile(r"\\[,;:!]|\\ |~|\\quad|\\qquad|\\left(?![a-z])|\\right(?![a-z])")
_degrees = re.compile(r"\s*(?:\^\{?\\circ\}?|°|\\degree|\bdegrees?\b)\s*$")
_exponent = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,4})")
_based = re.compile(r"(\d+)_\{?(\d{1,2})\}?")
_repeating = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}")
_mixed = re.compile(r"([+-]?)(\d+)\s+(?:(\d+)/(\d+)|\\[dt]?frac\{(\d+)\}\{(\d+)\})")
_grouped = re.compile(r"\d{1,3}(?: \d{3})+(?:\.\d+)?")
_apart = re.compile(r"\d\s+\d")
_bare_fraction = re.compile(r"\\[dt]?frac\s*(\d|(?<=\s)[a-z])\s*(\d|[a-z](?![a-z]))")
_dots = re.compile(r"[^,\s]\s*\\[lc]?dots[bcio]?$")
_bare_root = re.compile(r"\\sqrt\s*(\d)")
_plain_root = re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)")
_plain_word = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|pi)(?![A-Za-z])")
_power = re.compile(r"\*\*\s*(-?[\w.]+(?:\^\{[^ ]*\})?|\([^()]*\))")
_long_exponent = re.compile(r"\^(-?\d{2,})")
_name = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?|\\[a-z]+|\\text\{[^{}]+\}")
_text_unit = re.compile(
    r"(?P<value>.*[\d})])\s*(?P<unit>\\(?:text|textrm|mathrm|mbox|operatorname)\{[^{}]*[a-zA-Z]"
    r"[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?(?:\s*/\s*\\(?:text|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?)?)",
    re.DOTALL,
)
_plain_unit = re.compile(
    r"(?P<value>[+-]?[\d.,]+(?:/\d+)?(?:\s*(?:\\times|\\cdot)\s*10\^\{?-?\d+\}?)?)\s*"
    r"(?P<unit>[A-Za-zµμΩ]+(?:\^?\{?[-\d²³]+\}?)?(?:\s*(?:/|per)\s*[A-Za-z]+(?:\^?\{?[\d²³]\}?)?)?)"
)
_UNIT_LETTERS = str.maketrans({"²": "^2", "³": "^3", "μ": "µ", "{": "", "}": ""})
_SYMBOLS = """
m s g h l L N J W V A K C F T Hz Pa kPa km cm mm nm kg mg ml mL kW kN kJ eV min hr ft in mi yd lb oz
mol MB GB kB ms rad sr
"""
"""Units that are written with a symbol; other plain units are words of at least three letters."""


def _read_values(formula: str) -> Iterator[_Value]:
    """Every way to read a formula as a whole; nothing if it cannot be read to its end."""
    text = _degrees.sub("", _clean_formula(formula))
    if not text or _dots.search(text):
        return
    if "=" in text and not re.search(r"[<>]=|\\[lg]eq?|!=", text):
        yield from _read_equation(text)
        return
    special = _read_number(text)
    if special is not None:
        yield special
        return
    if text.endswith("%"):
        for value in _read_values(text.removesuffix("%").removesuffix("\\")):
            yield _Value(text, value.expression / 100, value.unit)
        return
    for pattern in (_text_unit, _plain_unit):
        match = pattern.fullmatch(text)
        if match and (unit := _normalize_unit(match["unit"], plain=pattern is _plain_unit)):
            for value in _read_values(match["value"]):
                yield _Value(value.formula, value.expression, unit)
    expression = None if _apart.search(text) else _parse_latex(text)
    if expression is not None:
        yield _Value(text, expression)


def _clean_formula(formula: str) -> str:
    """A formula without delimiters, marks of space, currency signs and a full stop at its end."""
    text = _write_latex(formula).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening):
            text = text[len(opening) : -len(closing)].strip()
    text = _spaces.sub(" ", text).replace(r"\mathrm{e}", "e").replace(r"\$", "").lstrip("$€£ ")
    text = _bare_fraction.sub(r"\\frac{\1}{\2}", _bare_root.sub(r"\\sqrt{\1}", text))
    text = _long_exponent.sub(r"^{\1}", _write_powers(text))
    text = _plain_word.sub(r"\\\1", _plain_root.sub(r"\\sqrt{\1}", text))
    text = " ".join(text.rstrip(".,; ").split())
    return text.removeprefix("=").lstrip() if text.count("=") == 1 else text


def _write_latex(formula: str) -> str:
    """A formula with LaTeX in place of the signs that Unicode has: `½`, `x²`, `√2`, `×`."""
    text = "".join(map(_write_fraction, formula)).translate(_LATEX)
    text = _superscript.sub(lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    return _root_sign.sub(lambda found: rf"\sqrt{{{next(filter(None, found.groups()), '')}}}", text)


def _write_fraction(character: str) -> str:
    kind, *codes = unicodedata.decomposition(character).split() or [""]
    if kind != "<fraction>":
        return character
    above, _, below = "".join(chr(int(code, 16)) for code in codes).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}" if below else character


def _write_powers(text: str) -> str:
    """Writes powers with `**`, which group from the right, as the grammar has them."""
    for at in reversed([mark.start() for mark in re.finditer(r"\*\*", text)]):
        match = _power.match(text, at)
        if match:
            text = f"{text[:at]}^{{{match[1]}}}{text[match.end() :]}"
    return text


def _read_number(text: str) -> _Value | None:
    """Numbers that the grammar reads otherwise: with an exponent, a base, or a repeating part."""
    from sympy import Rational

    plain = _grouped.fullmatch(text) and text.replace(" ", "")
    if plain:
        return _Value(plain, Rational(plain))
    if match := _exponent.fullmatch(text):
        return _Value(text, Rational(match[1]) * Rational(10) ** int(match[2]))
    if match := _based.fullmatch(text):
        base = int(match[2])
        if not 2 <= base <= 36 or any(int(digit) >= base for digit in match[1]):
            return None
        return _Value(text, Rational(int(match[1], base)), f"base {base}")
    if match := _repeating.fullmatch(text):
        sign, whole, head, cycle = match.groups()
        shift = 10 ** len(head)
        value = Fraction(int(head or 0), shift) + Fraction(
            int(cycle), shift * (10 ** len(cycle) - 1)
        )
        value += int(whole or 0)
        return _Value(text, Rational(value) * (-1 if sign == "-" else 1))
    if match := _mixed.fullmatch(text):
        above, below = int(match[3] or match[5]), int(match[4] or match[6])
        if below == 0:
            return None
        value = int(match[2]) + Fraction(above, below)
        return _Value(text, Rational(value) * (-1 if match[1] == "-" else 1))
    return None


def _read_equation(text: str) -> Iterator[_Value]:
    """The value that an equation gives to a name, or that all of its sides have; and itself."""
    sides = [side.strip() for side in text.split("=")]
    names = [side for side in (sides[0], sides[-1]) if _name.fullmatch(side)]
    if names:
        values = [side for side in sides if side not in names]
        given = [list(_read_values(side)) for side in values]
        if given and all(given) and _all_equal([ways[0].expression for ways in given]):
            yield from given[-1]
    else:
        given = [list(_read_values(side)) for side in sides]
        numbers = all(ways and getattr(ways[0].expression, "is_number", False) for ways in given)
        if numbers and _all_equal([ways[0].expression for ways in given]):
            yield from given[-1]
            return
        if numbers:
            return
    expression = _parse_latex(text)
    if expression is not None:
        yield _Value(text, expression)


def _all_equal(expressions: list[Any]) -> bool:
    verify = _import_math_verify().verify
    return all(verify(expressions[0], other, timeout_seconds=None) for other in expressions[1:])


def _normalize_unit(unit: str, *, plain: bool) -> str:
    text = re.sub(r"\\[a-z]+\{([^{}]*)\}", r"\1", unit)
    text = text.translate(_UNIT_LETTERS)
    text = re.sub(r"\s*(?:/|\bper\b)\s*", "/", text.strip(" ."))
    words = re.sub(r"\s+", " ", text).strip()
    if plain:
        first = re.match(r"[A-Za-zµΩ]+", words)
        if first is None or (first[0] not in _SYMBOLS.split() and len(first[0]) < 3):
            return ""
    return re.sub(r"(?<=[a-z]{3})s\b", "", words)


def _parse_latex(text: str) -> Any:
    """The expression of a formula; None unless the grammar reads it to its end."""
    library = _import_latex()
    try:
        return library.latex2sympy(text)
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001  (the grammar raises bare exceptions)
        return None


# Comparison --------------------------------------------------------------------------------------


def _are_equal(right: _Value, value: _Value) -> bool:
    """Whether two values are equal; a right answer without a unit is equal with any.

    Numbers must agree in decimals, by the library, and in significant digits: decimals alone would
    make all small numbers equal.
    """
    if right.unit and right.unit != value.unit:
        return False
    distance = _relative_distance(right.expression, value.expression)
    if distance is not None and distance < _SAME:
        return True
    same = _import_math_verify().verify(
        right.expression, value.expression, float_rounding=_DIGITS, timeout_seconds=None
    )
    return bool(same) and (distance is None or distance <= 10.0 ** (1 - _DIGITS))


_SAME = 1e-12
"""Relative distance of two numbers that differ only by the rounding of floats."""


def _relative_distance(right: Any, value: Any) -> float | None:
    """|a − b| / max(|a|, |b|) of two finite numbers; None of anything else."""
    if not (getattr(right, "is_number", False) and getattr(value, "is_number", False)):
        return None
    try:
        a, b = complex(right.evalf(30)), complex(value.evalf(30))
    except (TypeError, ValueError, OverflowError):
        return None
    largest = max(abs(a), abs(b))
    if not math.isfinite(largest):
        return None
    return abs(a - b) / largest if largest else 0.0


# The library -------------------------------------------------------------------------------------

_MISSING = "the reward math_verify needs the package `math-verify`: pip install 'rlx[math]'"


@lru_cache(maxsize=1)
def _import_math_verify() -> Any:
    try:
        library = import_module("math_verify")
    except ImportError:
        raise ImportError(_MISSING) from None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # One comparison up front: child processes inherit what it imports and caches.
    parse = _import_latex().latex2sympy
    library.verify(parse("(x+1)^2"), parse("x^2+2x+1"), timeout_seconds=None)
    return library


@lru_cache(maxsize=1)
def _import_latex() -> Any:
    return import_module("latex2sympy2_extended")


@lru_cache(maxsize=1024)
def _read_right_answer(answer: str) -> "tuple[_Value, ...]":
    """The values of a right answer, cached because a group of samples shares it."""
    formula = find_formula(answer, whole=True)
    found = tuple(_read_values(formula)) if formula is not None else ()
    if not found:
        raise ValueError(f"the right answer {answer!r} cannot be read as mathematics")
    return found
