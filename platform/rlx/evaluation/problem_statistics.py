"""Two recipes on the same problems: what their answers differ in, problem by problem."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlx.evaluation.scores import compute_clipped_losses
from rlx.evaluation.seed_statistics import LEVEL, RESAMPLES, compute_permutation_p_value

__all__ = ["FIGURES", "EvaluationAnswers", "ProblemDifference", "compare_by_problem"]

FIGURES = ("accuracy", "mean_confidence", "brier", "nll")
"""Those that are means over answers, so that each problem has its own."""
SAME = 0.9
"""Share of the smaller set's problems that must be in the other; a few may have been dropped."""

Values = Mapping[str, Sequence[float]]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EvaluationAnswers:
    """The answers of one evaluation.

    Attributes:
        problems: `n` ids, the same for the same problem in every run.
        values: for each of `FIGURES` that it has, `n` figures of single answers.
    """

    problems: tuple[str, ...]
    values: Values

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any] | None) -> Self | None:
        """Reads what evaluations keep: `problem_ids`, `correct`, and `confidence`, null for one
        that could not be read and counts as 0; None where it is not there."""
        kept = payload or {}
        if not kept.get("problem_ids") or not kept.get("correct"):
            return None
        y = np.array(kept["correct"], dtype=np.float64)
        values: dict[str, Sequence[float]] = {"accuracy": y.tolist()}
        if kept.get("confidence") is not None:
            stated = np.array([c or 0.0 for c in kept["confidence"]], dtype=np.float64)
            values["mean_confidence"] = stated.tolist()
            values["brier"] = ((stated - y) ** 2).tolist()
            values["nll"] = compute_clipped_losses(y, stated).tolist()
        return cls(tuple(kept["problem_ids"]), values)


@dataclass(frozen=True, slots=True)
class ProblemDifference:
    """A figure of one recipe minus that of another, over the problems that both were asked.

    Attributes:
        problems: how many.
        seeds: whose answers are compared: those that both have. Empty where they share none, and
            all are taken.
        mean: over problems, of the difference between the means over answers of every seed; a
            problem that was asked more often weighs more, as in the figures of an evaluation.
        low, high: ends of its 95 % interval, by bootstrap over problems.
        p: share of changes of sign of the problems' differences whose mean is at least as far
            from 0: the paired permutation test over problems.
    """

    problems: int
    seeds: tuple[int, ...]
    mean: float
    low: float
    high: float
    p: float


def compare_by_problem(
    one: Mapping[int, EvaluationAnswers], other: Mapping[int, EvaluationAnswers]
) -> dict[str, ProblemDifference] | None:
    """Compares the answers of two recipes to the same problems.

    What varies is the problem: the trained models are taken as they are, and what another seed
    would have made of a recipe is for `rlx.evaluation.seed_statistics` to say.

    Args:
        one, other: evaluations of one set, by the run's seed.

    Returns:
        For each figure that both have `one` minus `other`; None where they were asked other
        problems.

    Reference:
        Fisher, "The design of experiments", 1935, section 21; Efron and Tibshirani, "An
        introduction to the bootstrap", 1993, section 13.3.
    """
    seeds = tuple(sorted(one.keys() & other.keys()))
    sides = [[side[seed] for seed in seeds or sorted(side)] for side in (one, other)]
    problems = [{id_ for asked in side for id_ in asked.problems} for side in sides]
    shared = sorted(problems[0] & problems[1])
    if len(shared) < max(2, SAME * min(map(len, problems))):
        return None
    found = {}
    for figure in FIGURES:
        if all(figure in asked.values for side in sides for asked in side):
            answers = [_group_values_by_problem(side, figure) for side in sides]
            ours, theirs = (np.array([np.mean(own[id_]) for id_ in shared]) for own in answers)
            weights = _compute_problem_weights(
                [[len(own[id_]) for id_ in shared] for own in answers]
            )
            gaps = weights * (ours - theirs)
            low, high = _compute_weighted_interval(gaps, weights)
            mean = float(gaps.sum() / weights.sum())
            found[figure] = ProblemDifference(
                len(shared), seeds, mean, low, high, compute_permutation_p_value(gaps)
            )
    return found


def _group_values_by_problem(
    side: Sequence[EvaluationAnswers], figure: str
) -> dict[str, list[float]]:
    """By problem the answers of all evaluations."""
    answers: dict[str, list[float]] = {}
    for asked in side:
        for id_, value in zip(asked.problems, asked.values[figure], strict=True):
            answers.setdefault(id_, []).append(value)
    return answers


def _compute_problem_weights(counts: Sequence[Sequence[int]]) -> Floats:
    """A problem's share of both sides' answers, up to a factor that makes them whole numbers."""
    one, other = (np.array(own) for own in counts)
    weights = one * other.sum() + other * one.sum()
    whole: Floats = (weights // np.gcd.reduce(weights)).astype(np.float64)
    return whole


def _compute_weighted_interval(gaps: Floats, weights: Floats) -> tuple[float, float]:
    """Of the weighted mean, problems drawn with replacement."""
    from scipy.stats import bootstrap

    def compute_weighted_mean(gap: Floats, weight: Floats, axis: int) -> Floats:
        mean: Floats = gap.sum(axis=axis) / weight.sum(axis=axis)
        return mean

    found = bootstrap(
        (gaps, weights),
        compute_weighted_mean,
        paired=True,
        confidence_level=LEVEL,
        method="percentile",
        n_resamples=RESAMPLES,
        batch=1000,
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
