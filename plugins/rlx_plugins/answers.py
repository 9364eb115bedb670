"""Accuracy rewards that compare with known answers: as text, or as mathematics by math-verify.

Both read one span of a turn and one field of its problem. The field may hold a list of acceptable
answers.
"""

import logging
import os
import re
import signal
import string
import traceback
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlx.plugin import Example, Reward, Sample, Score


def _build_answer_example(
    name: str, answer: str, right: Any, value: float, **options: Any
) -> Example:
    sample = Sample(
        id="a",
        problem={"answer": right},
        turn="answer",
        number=1,
        response=f"<answer>{answer}</answer>",
        spans={"answer": answer},
    )
    return Example(name=name, sample=sample, value=value, options=options)


class _AnswerReward(Reward):
    span: str | None = "answer"
    """The span to read; null for the whole response."""
    field: str = "answer"
    """The problem's field that holds the right answer: text, a number, or a list of them."""

    def _get_answer_text(self, sample: Sample) -> str:
        """The model's answer; "" without one."""
        text = sample.response if self.span is None else sample.spans.get(self.span, "")
        return text.strip()

    def _right(self, sample: Sample) -> tuple[str, ...]:
        """The right answers.

        Raises:
            ValueError: the problem has none, which is an error in the data, not in the response.
        """
        value = sample.problem.get(self.field)
        values = value if isinstance(value, list | tuple) else [value]
        if not values or not all(map(_is_answer, values)):
            raise ValueError(f"the field {self.field!r} must hold text or numbers, got {value!r}")
        return tuple(str(v).strip() for v in values)


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, int | float) and not isinstance(value, bool)


class AnswerExactMatch(_AnswerReward):
    """1 if the answer equals a right one exactly, ignoring surrounding white space, else 0.

    `normalize: text` compares as in question answering (SQuAD, HotpotQA), ignoring case, ASCII
    punctuation, the articles a, an and the, and white space between words.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_answer_example("gold", " Paris\n", "Paris", 1.0),
        _build_answer_example("another case", "paris", "Paris", 0.0),
        _build_answer_example("one of several", "7", [7, "seven"], 1.0),
        _build_answer_example(
            "normalised", "The  answer: U.S.A.!", "answer usa", 1.0, normalize="text"
        ),
        _build_answer_example(
            "normalised and wrong", "answer", "answer usa", 0.0, normalize="text"
        ),
        _build_answer_example("nothing left", "!!! the a an", "answer usa", 0.0, normalize="text"),
    )

    normalize: Literal["none", "text"] = "none"

    def score(self, sample: Sample) -> Score:
        """Compares one answer.

        Raises:
            ValueError: the problem holds no right answer, or one that normalizes to nothing.
        """
        normal = _normal_text if self.normalize == "text" else str
        right = {normal(one) for one in self._right(sample)}
        if "" in right:
            raise ValueError(f"normalising leaves nothing of {sample.problem[self.field]!r}")
        answer = self._get_answer_text(sample)
        if not answer:
            return Score(0.0, "no answer")
        return Score(1.0) if normal(answer) in right else Score(0.0, "wrong answer")


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_articles = re.compile(r"\b(?:a|an|the)\b")


def _normal_text(text: str) -> str:
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_articles.sub(" ", bare).split())


# Mathematics -------------------------------------------------------------------------------------

_RIGHT, _WRONG, _UNREADABLE, _TOO_LARGE, _FAILED = range(5)  # exit codes of a comparison
_REASONS = {
    _RIGHT: None,
    _WRONG: "wrong answer",
    _UNREADABLE: "unreadable",
    _TOO_LARGE: "too large to compare",
    -signal.SIGPROF: "too slow to compare",
}
_MARKS = ("$", r"\boxed", r"\(", r"\[")


class MathVerify(_AnswerReward):
    """1 if the answer is mathematically equal to a right one, else 0; uses math-verify.

    The library reads the last formula of the text. A span without `$`, `\\(`, `\\[` or `\\boxed`
    is read as one formula. Answers such as `9**9**9` would take hours to compute, so each
    comparison runs in its own process with a time limit; an answer that exceeds it is wrong.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_answer_example("gold", "72", "72", 1.0),
        _build_answer_example("another form", r"$\frac{2}{4}$", 0.5, 1.0),
        _build_answer_example("wrong", "71", "72", 0.0),
        _build_answer_example("one of several", "x^2+2x+1", ["(x+1)^2", "x"], 1.0),
        _build_answer_example("computed for hours", "9**9**9", "72", 0.0, seconds=0.2),
        _build_answer_example("not mathematics", "???", "72", 0.0),
    )

    float_rounding: int = Field(6, ge=0)
    """Number of decimals compared."""
    max_length: int = Field(2000, ge=1)
    """Maximum number of characters read, from the end of the answer."""
    seconds: float = Field(1.0, gt=0, le=60)
    """Processor time of one comparison; keep it well below the reward's `deadline`."""

    def __setstate__(self, state: dict[Any, Any]) -> None:
        # Runs in a worker: the import must not count against the first sample's deadline.
        super().__setstate__(state)
        _import_math_verify()

    def check(self) -> None:
        """Checks that math-verify is installed.

        Raises:
            ImportError: it is not installed.
        """
        if find_spec("math_verify") is None:
            raise ImportError(_MISSING)

    def score(self, sample: Sample) -> Score:
        """Compares one answer.

        Raises:
            ValueError: the problem holds no right answer, or one that cannot be parsed.
            RuntimeError: the library failed; its traceback is on stderr.
        """
        right = self._right(sample)
        answer = self._get_answer_text(sample)[-self.max_length :]
        if not answer:
            return Score(0.0, "no answer")
        code = self._compare(
            [formula for one in right for formula in _parse_right_answer(one)], answer
        )
        if code == _FAILED:
            raise RuntimeError("math-verify failed on an answer; its traceback is on stderr")
        reason = _REASONS.get(code, f"ended its process by signal {-code}")
        return Score(float(code == _RIGHT), reason)

    def _compare(self, right: list[Any], answer: str) -> int:
        """Compares in a child process, which the kernel kills when its time is up."""
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        code = _FAILED
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, self.seconds)
            found = _parse_formulas(answer, whole=self.span is not None)
            same = _import_math_verify().verify(
                right, found, float_rounding=self.float_rounding, timeout_seconds=None
            )
            code = _RIGHT if same else _WRONG if found else _UNREADABLE
        except (RecursionError, MemoryError):  # the answer is too large
            code = _TOO_LARGE
        except Exception:  # noqa: BLE001  (printed here; the parent raises)
            traceback.print_exc()
        finally:
            os._exit(code)


_MISSING = "the reward math_verify needs the package `math-verify`: pip install 'rlx[math]'"


@lru_cache(maxsize=1)
def _import_math_verify() -> Any:
    try:
        library = import_module("math_verify")
    except ImportError:
        raise ImportError(_MISSING) from None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # One comparison up front: child processes inherit what it imports and caches.
    square, sum_ = (library.parse(t, parsing_timeout=None) for t in ("$(x+1)^2$", "$x^2+2x+1$"))
    library.verify(square, sum_, timeout_seconds=None)
    return library


@lru_cache(maxsize=1024)
def _parse_right_answer(answer: str) -> tuple[Any, ...]:
    """The formulas of a right answer, cached because a group of samples shares it."""
    found = _parse_formulas(answer, whole=True)
    if not any(map(_is_formula, found)):
        raise ValueError(f"the right answer {answer!r} cannot be read as mathematics")
    return tuple(found)


def _parse_formulas(text: str, *, whole: bool) -> list[Any]:
    """The formulas of a text, and the text of the last; `whole` reads the text as one formula.

    The library's time limits are off, because they would replace the worker's alarm.
    """
    parse = _import_math_verify().parse
    if whole and not any(mark in text for mark in _MARKS):
        found: list[Any] = parse(rf"\boxed{{{text}}}", parsing_timeout=None)
        if any(map(_is_formula, found)):
            return found
    return list(parse(text, parsing_timeout=None))


def _is_formula(found: Any) -> bool:
    return not isinstance(found, str)
