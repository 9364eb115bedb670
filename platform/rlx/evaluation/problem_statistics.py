"""Compare two recipes on the same problems, with paired tests over problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlx.evaluation.scores import compute_clipped_losses
from rlx.evaluation.seed_statistics import LEVEL, RESAMPLES, compute_permutation_p_value

__all__ = ["FIGURES", "EvaluationAnswers", "ProblemDifference", "compare_by_problem"]

FIGURES = ("accuracy", "mean_confidence", "brier", "nll")
"""Metrics that are means over answers, so that each problem has its own value."""
SAME = 0.9
"""Minimum share of the smaller set's problems in the other set; a few may have been dropped."""

Values = Mapping[str, Sequence[float]]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EvaluationAnswers:
    """The answers of one evaluation.

    Attributes:
        problems: `n` problem ids, the same in every run.
        values: `n` values of single answers, for each available metric of `FIGURES`.
    """

    problems: tuple[str, ...]
    values: Values

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any] | None) -> Self | None:
        """Reads the payload of a recorded evaluation: `problem_ids`, `correct` and `confidence`.

        An unreadable confidence is null and counts as 0. Returns None if ids or labels are missing.
        """
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
    """Difference of a metric between two recipes, over their common problems.

    Attributes:
        problems: number of common problems.
        seeds: the common seeds, whose answers are compared. Empty if there are none; then the
            answers of all seeds are compared.
        mean: mean over problems of the difference between the recipes' mean values. Problems with
            more answers weigh more, as in the metrics of an evaluation.
        low, high: 95 % interval, by bootstrap over problems.
        p: p-value of the paired permutation test over problems: share of sign flips of the
            problems' differences whose mean is at least as far from 0.
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

    Only problems are resampled; the trained models are fixed. For the variation between training
    seeds see `rlx.evaluation.seed_statistics`.

    Args:
        one, other: evaluations of one set, by the run's seed.

    Returns:
        `one` minus `other` for each metric that both have; None if they have different problems.

    Reference:
        Fisher, "The design of experiments", 1935, section 21; Efron and Tibshirani, "An
        introduction to the bootstrap", 1993, section 13.3.
    """
    seeds = tuple(sorted(one.keys() & other.keys()))
    sides = [[side[seed] for seed in seeds or sorted(side)] for side in (one, other)]
    problems = [{id_ for evaluation in side for id_ in evaluation.problems} for side in sides]
    shared = sorted(problems[0] & problems[1])
    if len(shared) < max(2, SAME * min(map(len, problems))):
        return None
    found = {}
    for figure in FIGURES:
        if all(figure in evaluation.values for side in sides for evaluation in side):
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
    """Values of all evaluations, grouped by problem."""
    answers: dict[str, list[float]] = {}
    for evaluation in side:
        for id_, value in zip(evaluation.problems, evaluation.values[figure], strict=True):
            answers.setdefault(id_, []).append(value)
    return answers


def _compute_problem_weights(counts: Sequence[Sequence[int]]) -> Floats:
    """Each problem's share of both sides' answers, scaled to integers."""
    one, other = (np.array(own) for own in counts)
    weights = one * other.sum() + other * one.sum()
    whole: Floats = (weights // np.gcd.reduce(weights)).astype(np.float64)
    return whole


def _compute_weighted_interval(gaps: Floats, weights: Floats) -> tuple[float, float]:
    """Percentile bootstrap interval of the weighted mean over problems."""
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
