"""Countdown: reach a target by arithmetic on given numbers (after TinyZero)."""

from rlx_plugins.countdown.rewards import CountdownArithmetic, CountdownScore, CountdownVerify
from rlx_plugins.countdown.scorer import (
    compute_score,
    evaluate_equation,
    extract_solution,
    validate_equation,
    verify_equation_strict,
)
from rlx_plugins.countdown.task import CountdownTask

__all__ = [
    "CountdownArithmetic",
    "CountdownScore",
    "CountdownTask",
    "CountdownVerify",
    "compute_score",
    "evaluate_equation",
    "extract_solution",
    "validate_equation",
    "verify_equation_strict",
]
