"""The reward for true sums in the reasoning of a right Countdown answer."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.plugin import Example, Reward, Sample, Score
from rlx_plugins.countdown.expression import (
    Number,
    evaluate_expression,
    evaluate_tokens,
    tokenize_expression,
)
from rlx_plugins.countdown.rewards import check_ground_truth
from rlx_plugins.examples import build_example

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

    If only the answer is rewarded, the written sums degrade, and with them the evidence that tells
    right from wrong answers. `of` names the reward for correctness: a wrong answer scores 0, since
    true sums that lead nowhere are easier to write than right answers. An answer without sums also
    scores 0. To bound the time, only 64 lines are read, and one of more than 256 characters counts
    as a false sum.
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
