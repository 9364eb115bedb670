"""The Countdown reward plugins for answers: TinyZero's graded score, and strict correctness."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlx.plugin import Example, Reward, Sample, Score
from rlx_plugins.countdown.expression import Ops
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
