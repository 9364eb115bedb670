"""The Countdown reward plugins: TinyZero's graded score, strict correctness, and true sums."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlx.plugin import Example, Reward, Sample, Score
from rlx_plugins.countdown.expression import Numeric, Ops, evaluate_expression
from rlx_plugins.countdown.scorer import (
    Extract,
    Grade,
    compute_grade_points,
    extract_solution,
    grade_solution,
)

__all__ = ["CountdownArithmetic", "CountdownScore", "CountdownVerify", "check_ground_truth"]

_LONGEST_SUM = 256


def check_ground_truth(problem: Mapping[str, Any]) -> None:
    """Checks that a problem can be scored.

    Raises:
        ValueError: `numbers` is not a list of finite numbers, or `target` not a finite number.
    """
    numbers, target = problem.get("numbers"), problem.get("target")
    if not isinstance(numbers, list | tuple) or not all(map(_is_number, numbers)):
        raise ValueError(f"numbers must be a list of finite numbers, got {numbers!r}")
    if not _is_number(target):
        raise ValueError(f"target must be a finite number, got {target!r}")


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _build_countdown_example(
    name: str, answer: str, value: float, reason: str | None = None, **options: Any
) -> Example:
    """An example that answers "reach 10 with 2, 3 and 4"."""
    problem = {"numbers": [2, 3, 4], "target": 10}
    sample = Sample(id="0", problem=problem, turn="answer", number=1, response=answer)
    return Example(name=name, sample=sample, value=value, reason=reason, options=options)


class _CountdownReward(Reward):
    method: Literal["strict"] = "strict"
    """TinyZero's name for its only method; it has no effect."""
    format_score: float = 0.1
    """Score of an answer block without a right equation."""
    score_: float = Field(1.0, alias="score")
    """Score of a right equation."""
    extract: Extract = "seed"
    """`seed`: the answer must be on the last line. `last_block`: the last answer block anywhere."""
    ops: Ops = "seed"
    """`seed`: also `**`, `//` and signs. `prompt`: `+ - * /` only."""
    numeric: Numeric = "float64"
    """`float64`: as Python computes, equal within 1e-5. `exact`: rationals, exactly equal."""
    allow_decimals: bool = True
    """Whether decimals such as `2.5` are allowed, which then uses a 2 and a 5."""
    use_all: bool = True
    """Whether every number must be used."""

    def _grade(self, sample: Sample) -> Grade:
        check_ground_truth(sample.problem)
        return grade_solution(
            sample.response,
            sample.problem,
            self.extract,
            self.ops,
            self.numeric,
            self.allow_decimals,
            self.use_all,
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
        _build_countdown_example("code", "<answer>__import__('os').abort()</answer>", 0.1),
        _build_countdown_example("a tower of powers", "<answer>2**3**4**9**9</answer>", 0.1),
    )

    def score(self, sample: Sample) -> Score:
        """Scores one answer."""
        verdict = self._grade(sample)
        lost = verdict.level == "none" and (
            extract_solution(sample.response, "last_block") is not None
        )
        parts = {"format_lost_to_lastline": float(lost)}
        return Score(
            compute_grade_points(verdict, self.format_score, self.score_), verdict.reason, parts
        )


class CountdownVerify(_CountdownReward):
    """1 if the Countdown score with the same options is 1.0, else 0.

    A format score never counts as correct, even if `format_score` is 1.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_countdown_example("gold", "<answer>3*4-2</answer>", 1.0),
        _build_countdown_example("wrong", "<answer>2+3+4</answer>", 0.0, "wrong value"),
        _build_countdown_example("a power", "<answer>2**3+4</answer>", 0.0, ops="prompt"),
        _build_countdown_example(
            "the last of two blocks", "<answer>3*4-2</answer><answer>1</answer>", 0.0
        ),
        _build_countdown_example("code", "<answer>(lambda: 10)()</answer>", 0.0),
    )

    def score(self, sample: Sample) -> Score:
        """Judges one answer."""
        verdict = self._grade(sample)
        return Score(float(compute_grade_points(verdict, 0.0, self.score_) == 1.0), verdict.reason)


def _build_reasoning_example(
    name: str, think: str, of: float, value: float, reason: str | None
) -> Example:
    spans = {"think": think}
    sample = Sample(id="0", problem={}, turn="answer", number=1, response=think, spans=spans, of=of)
    return Example(name=name, sample=sample, value=value, reason=reason)


class CountdownArithmetic(Reward):
    """Of a right answer, the share of true sums, such as `3*5=15`, in its reasoning.

    If only the answer is rewarded, the written sums degrade, and with them the evidence that tells
    right from wrong answers. `of` names the reward for correctness: a wrong answer scores 0, since
    true sums that lead nowhere are easier to write than right answers. An answer without sums also
    scores 0. To bound the time, a line of more than 256 characters counts as a false sum.
    """

    reads_parent: ClassVar[bool] = True
    examples: ClassVar[tuple[Example, ...]] = (
        _build_reasoning_example("gold", "3*4=12\n12-2=10\n", 1.0, 1.0, None),
        _build_reasoning_example("half of it false", "3*4=11\n12-2=10\n", 1.0, 0.5, "false sums"),
        _build_reasoning_example("no sums", "three times four", 1.0, 0.0, "no sums"),
        _build_reasoning_example("true sums, wrong answer", "3*4=12\n", 0.0, 0.0, "wrong answer"),
        _build_reasoning_example("endless sums", "1=1\n" * 50_000 + "1=2", 1.0, 1.0, None),
        _build_reasoning_example("division by zero", "1/0=1\n", 1.0, 0.0, "false sums"),
        _build_reasoning_example("a tower of powers", "9**9**9=1\n", 1.0, 0.0, "false sums"),
    )

    span: str = "think"
    """Span that contains the sums."""
    max_lines: int = Field(64, ge=1)
    """Maximum number of lines read."""

    def score(self, sample: Sample) -> Score:
        """Checks one turn's sums."""
        if sample.of != 1.0:
            return Score(0.0, "wrong answer")
        lines = sample.spans.get(self.span, "").split("\n")[: self.max_lines]
        sums = [line for line in lines if line.count("=") == 1]
        if not sums:
            return Score(0.0, "no sums")
        true = sum(_is_equation_true(*line.split("=")) for line in sums)
        return Score(true / len(sums), None if true == len(sums) else "false sums")


def _is_equation_true(left: str, right: str) -> bool:
    if len(left) + len(right) > _LONGEST_SUM:
        return False
    try:
        return evaluate_expression(left, numeric="exact") == evaluate_expression(
            right, numeric="exact"
        )
    except ArithmeticError:
        return False
