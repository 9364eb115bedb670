"""The Countdown reward plugins: TinyZero's graded score, strict correctness, and true sums."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlx.plugin import Example, Reward, Sample, Score
from rlx_plugins.countdown.expression import (
    Number,
    Ops,
    evaluate_expression,
    evaluate_tokens,
    tokenize_expression,
)
from rlx_plugins.countdown.scorer import Extract, Grade, extract_solution, grade_solution
from rlx_plugins.examples import build_example


def check_ground_truth(problem: Mapping[str, Any]) -> None:
    """Raises ValueError for a problem without finite `numbers` and `target`."""
    numbers, target = problem.get("numbers"), problem.get("target")
    if not isinstance(numbers, list | tuple) or not all(map(is_finite_number, numbers)):
        raise ValueError(f"numbers must be a list of finite numbers, got {numbers!r}")
    if not is_finite_number(target):
        raise ValueError(f"target must be a finite number, got {target!r}")


def is_finite_number(value: Any) -> bool:
    """Whether a value is an int or a finite float; a bool is neither."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _build_countdown_example(
    name: str,
    answer: str,
    value: float,
    reason: str | None = None,
    *,
    numbers: Sequence[int] = (2, 3, 4),
    target: int = 10,
    **options: Any,
) -> Example:
    problem = {"numbers": list(numbers), "target": target}
    return build_example(name, value, answer, reason=reason, options=options, problem=problem)


_VANISHING: dict[str, Any] = {"numbers": (3, 8, 9, 50), "target": 50}


class _CountdownReward(Reward):
    method: Literal["strict"] = "strict"
    """TinyZero's name for its only method; it has no effect."""
    format_score: float = 0.1
    """Score of an answer block without a right equation."""
    score_: float = Field(1.0, alias="score")
    """Score of a right equation."""
    extract: Extract = "last_line"
    """`last_line`: the answer must be on the last line. `last_block`: the last answer block
    anywhere."""
    ops: Ops | Literal["auto"] = "auto"
    """`prompt`: `+ - * /` only, as prompts ask. `python`: also `**`, `//` and signs. `auto`:
    `python` if decimals are allowed, which is TinyZero's own rule, else `prompt`."""
    allow_decimals: bool = False
    """Whether decimals such as `2.5` are allowed, which then uses a 2 and a 5, and values within
    1e-5 of the target. `true` alone is TinyZero's own rule, which pays for answers that are none.
    Otherwise values must be exactly equal, as rationals; a target such as 0.3333333333333333 is the
    fraction that rounds to it."""

    def warnings(self) -> Sequence[str]:
        found = []
        if self._operators == "python":
            found.append(
                "ops is python: numbers may vanish by operators that prompts do not offer, so "
                "50+3//8*9 reaches 50 with 50, 3, 8 and 9"
            )
        if self.allow_decimals:
            found.append(
                "allow_decimals is true: a decimal counts as using its digits, so "
                "50+.0000003+.0000008+.0000009 reaches 50 with 50, 3, 8 and 9"
            )
        return found

    @property
    def _operators(self) -> Ops:
        if self.ops == "auto":
            return "python" if self.allow_decimals else "prompt"
        return self.ops

    def _grade(self, sample: Sample) -> Grade:
        check_ground_truth(sample.problem)
        return grade_solution(
            sample.response, sample.problem, self.extract, self._operators, self.allow_decimals
        )


class CountdownScore(_CountdownReward):
    """0 without an answer block, `format_score` with one, `score` for a right equation.

    Reads the problem's `numbers` and `target`, and only the response, never the prompt. A problem
    without them raises, because that is an error in the data. The part `format_lost_to_lastline` is
    1 if there is an answer block, but not on the last line.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_countdown_example("gold", "<think>3*4=12</think>\n<answer>3 * 4 - 2</answer>", 1.0),
        _build_countdown_example("wrong value", "<answer>2+3+4</answer>", 0.1, "wrong value"),
        _build_countdown_example("a number twice", "<answer>4+4+2</answer>", 0.1, "wrong numbers"),
        _build_countdown_example("no block", "3*4-2 = 10", 0.0, "no answer block"),
        _build_countdown_example(
            "block before the last line", "<answer>3*4-2</answer>\nDone.", 0.0
        ),
        _build_countdown_example(
            "block anywhere", "<answer>3*4-2</answer>\nDone.", 1.0, extract="last_block"
        ),
        _build_countdown_example(
            "decimals",
            "<answer>50+.0000003+.0000008+.0000009</answer>",
            0.1,
            "wrong value",
            **_VANISHING,
        ),
        _build_countdown_example(
            "decimals, by TinyZero's rule",
            "<answer>50+.0000003+.0000008+.0000009</answer>",
            1.0,
            **_VANISHING,
            allow_decimals=True,
        ),
        _build_countdown_example("code", "<answer>__import__('os').abort()</answer>", 0.1),
    )

    def value_range(self) -> tuple[float, float]:
        values = (0.0, self.format_score, self.score_)
        return min(values), max(values)

    def score(self, sample: Sample) -> Score:
        verdict = self._grade(sample)
        lost = verdict.level == "none" and (
            extract_solution(sample.response, "last_block") is not None
        )
        parts = {"format_lost_to_lastline": float(lost)}
        points = verdict.get_points(self.format_score, self.score_)
        return Score(points, verdict.reason, parts)


class CountdownVerify(_CountdownReward):
    """1 if the Countdown score with the same options is 1.0, else 0.

    A format score never counts as correct, even if `format_score` is 1.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_countdown_example("gold", "<answer>3*4-2</answer>", 1.0),
        _build_countdown_example("wrong", "<answer>2+3+4</answer>", 0.0, "wrong value"),
        _build_countdown_example(
            "decimals", "<answer>50+.0000003+.0000008+.0000009</answer>", 0.0, **_VANISHING
        ),
        _build_countdown_example("code", "<answer>(lambda: 10)()</answer>", 0.0),
    )

    def value_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, sample: Sample) -> Score:
        verdict = self._grade(sample)
        return Score(float(verdict.get_points(0.0, self.score_) == 1.0), verdict.reason)


# Sums in the reasoning ---------------------------------------------------------------------------

_LONGEST_SUM = 256
_MOST_LINES = 64
_result = re.compile(r"\s*-?[0-9]+(?:\.[0-9]+)?\s*", re.ASCII).fullmatch


def _build_reasoning_example(name: str, think: str, of: float, value: float, why: str) -> Example:
    problem = {"numbers": [2, 3, 4], "target": 10}
    return build_example(
        name, value, think, reason=why or None, problem=problem, spans={"think": think}, of=of
    )


class CountdownArithmetic(Reward):
    """Of a right answer, the share of true sums, such as `3*5=15`, in its span `think`.

    A true sum computes: its left side combines two or more of the problem's numbers and of the
    whole results of earlier true sums, each as often as it is there, and its right side is the
    value. An identity such as `1=1` or `3+5=3+5` is no true sum, nor is `1+1=2` without two ones.

    `of` names the reward for correctness: a wrong answer scores 0, since true sums that lead
    nowhere are easier to write than right answers. An answer without sums also scores 0. Only 64
    lines are read, and one of more than 256 characters counts as a false sum.
    """

    reads_parent: ClassVar[bool] = True
    examples: ClassVar[tuple[Example, ...]] = (
        _build_reasoning_example("gold", "3*4=12\n12-2=10\n", 1.0, 1.0, ""),
        _build_reasoning_example("half of it false", "3*4=12\n12-2=9\n", 1.0, 0.5, "false sums"),
        _build_reasoning_example("from a false sum", "3*4=11\n11-2=9\n", 1.0, 0.0, "false sums"),
        _build_reasoning_example("no sums", "three times four", 1.0, 0.0, "no sums"),
        _build_reasoning_example("true sums, wrong answer", "3*4=12\n", 0.0, 0.0, "wrong answer"),
        _build_reasoning_example("nothing computed", "3*4-2=3*4-2\n", 1.0, 0.0, "false sums"),
        _build_reasoning_example("endless", "1=1\n" * 50_000, 1.0, 0.0, "false sums"),
    )

    def score(self, sample: Sample) -> Score:
        if sample.of != 1.0:
            return Score(0.0, "wrong answer")
        lines = sample.spans.get("think", "").split("\n")[:_MOST_LINES]
        sums = [line for line in lines if line.count("=") == 1]
        if not sums:
            return Score(0.0, "no sums")
        true = _count_true_sums(sums, sample.problem)
        return Score(true / len(sums), None if true == len(sums) else "false sums")


def _count_true_sums(sums: list[str], problem: Mapping[str, Any]) -> int:
    check_ground_truth(problem)
    known = Counter[Number](problem["numbers"])
    true = 0
    for line in sums:
        left, _, right = line.partition("=")
        result = _compute_true_sum(left, right, known)
        if result is not None:
            known[abs(result)] += 1  # a sign is an operator
            true += 1
    return true


def _compute_true_sum(left: str, right: str, known: Counter[Number]) -> Number | None:
    """The result of a sum over known numbers; None if it is false or computes nothing."""
    if len(left) + len(right) > _LONGEST_SUM or not _result(right):
        return None
    try:
        tokens = tokenize_expression(left.strip(), "python", allow_decimals=False)
        value, used = evaluate_tokens(tokens, "python", "exact")
        if len(used) < 2 or Counter[Number](used) - known:
            return None
        return value if value == evaluate_expression(right, numeric="exact") else None
    except ArithmeticError:
        return None
