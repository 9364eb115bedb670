"""Intervals and paired tests over problems and over seeds."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlx.evaluation.calibration import compute_clipped_losses, convert_to_pairs

DRAWS = 1000
RESAMPLES = 9999
LEVEL = 0.95
TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
LEAST_DEFINED = 0.9
"""Minimum share of resamples in which a metric must be defined to get an interval."""

LEAST_SEEDS = 3
"""Minimum number of seeds for an interval: of two, Student's is 12.7 standard errors either way."""

Index = NDArray[np.intp]
Floats = NDArray[np.float64]
Range = tuple[float, float]
UNLIMITED: Range = (-math.inf, math.inf)


def compute_bootstrap_intervals(
    groups: Sequence[Hashable],
    measures: Mapping[str, Callable[[Index], float | None]],
    *,
    seed: int,
    draws: int = DRAWS,
) -> dict[str, tuple[float, float] | None]:
    """95 % percentile bootstrap intervals of metrics over grouped samples: whole groups are drawn,
    since answers to one problem are not independent.

    Args:
        groups: `[n]` the problem of each sample.
        measures: functions from sample positions, possibly repeated, to a metric; None if it is
            undefined.

    Returns:
        (low, high) by name; None with fewer than two groups, or if a metric was undefined in
        more than a tenth of the resamples.

    Reference:
        Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13; Field and Welsh,
        "Bootstrapping clustered data", 2007.
    """
    members: dict[Hashable, list[int]] = {}
    for position, group in enumerate(groups):
        members.setdefault(group, []).append(position)
    if len(members) < 2:
        return dict.fromkeys(measures)
    together = [np.array(positions, dtype=np.intp) for positions in members.values()]

    def measure_draws(chosen: NDArray[np.intp], axis: int) -> NDArray[np.float64]:
        """`[draws, groups]` drawn groups -> `[measures, draws]`; nan where undefined."""
        samples = [np.concatenate([together[g] for g in row]) for row in np.atleast_2d(chosen)]
        values = [[measure(own) for own in samples] for measure in measures.values()]
        return np.array(values, dtype=np.float64)

    drawn = _bootstrap((np.arange(len(together)),), measure_draws, seed, draws)
    found = {}
    for name, values in zip(measures, drawn.bootstrap_distribution, strict=True):
        defined = values[~np.isnan(values)]
        low, high = np.quantile(defined, TAILS).tolist() if len(defined) else (0.0, 0.0)
        found[name] = (low, high) if len(defined) >= LEAST_DEFINED * draws else None
    return found


def _bootstrap(data: tuple[Any, ...], statistic: Any, seed: int, draws: int, **options: Any) -> Any:
    from scipy.stats import bootstrap

    with warnings.catch_warnings():  # a measure may be constant or undefined
        warnings.simplefilter("ignore")
        return bootstrap(
            data,
            statistic,
            confidence_level=LEVEL,
            method="percentile",
            n_resamples=draws,
            vectorized=True,
            batch=1000,
            rng=np.random.default_rng(seed),
            **options,
        )


@dataclass(frozen=True, slots=True)
class SeedMean:
    """Mean of a metric over `n` seeds; `std` (n - 1) is None for one, the 95 % interval by
    Student's t, cut off at the range of the metric, for fewer than `LEAST_SEEDS`."""

    n: int
    mean: float
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class SeedDifference(SeedMean):
    """Difference of a metric between two recipes, paired by seed, with the p-value of the exact
    paired permutation test: with n seeds it is at least 2 / 2ⁿ."""

    p: float


def compute_seed_mean(values: Sequence[float], within: Range = UNLIMITED) -> SeedMean:
    """Mean, standard deviation and 95 % interval over independent runs, of a metric with values
    `within` a range."""
    if not values:
        raise ValueError("no values")
    n, mean = len(values), math.fsum(values) / len(values)
    std = float(np.std(values, ddof=1)) if n > 1 else None
    if std is None or n < LEAST_SEEDS:
        return SeedMean(n, mean, std, None, None)
    from scipy.stats import t

    half = float(t.ppf(TAILS[1], n - 1)) * std / math.sqrt(n)
    return SeedMean(n, mean, std, max(mean - half, within[0]), min(mean + half, within[1]))


def compute_paired_difference(
    one: Mapping[int, float], other: Mapping[int, float], within: Range = UNLIMITED
) -> SeedDifference | None:
    """Compares the values by seed of two recipes over their common seeds: `one` minus `other`,
    `within` a range; None if they share no seed.

    Reference:
        Fisher, "The design of experiments", 1935, section 21.
    """
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    gaps = np.array([one[seed] - other[seed] for seed in shared])
    mean = compute_seed_mean(gaps.tolist(), within)
    return SeedDifference(**asdict(mean), p=compute_permutation_p_value(gaps))


def compute_permutation_p_value(gaps: Floats) -> float:
    """Two-sided p-value of the paired permutation test that the mean of `[n]` weighted differences
    is 0: the share of all sign flips, or of `RESAMPLES` random ones, whose mean is at least as far
    from 0, without differences of exactly 0."""
    gaps = gaps[gaps != 0]
    if len(gaps) < 2:  # SciPy needs two; both signs of a single one are as far from 0
        return 1.0
    from scipy.stats import permutation_test

    found = permutation_test(
        (gaps,),
        np.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        batch=1000,
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


def correct_p_values(p_values: Sequence[float | None]) -> list[float | None]:
    """Corrects the p-values of a family of tests for their number; None is a test that was not
    made.

    Reference:
        Holm, "A simple sequentially rejective multiple test procedure", 1979.

    Example:
        >>> correct_p_values([0.01, None, 0.04, 0.03])
        [0.03, None, 0.06, 0.06]
    """
    made = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(made):
        largest = max(largest, min(1.0, p * (len(made) - rank)))
        corrected[place] = largest
    return corrected


FIGURES = ("accuracy", "mean_confidence", "brier", "nll")
"""Metrics that are means over answers, so that each problem has its own value."""
SAME = 0.9
"""Minimum share of the smaller set's problems in the other set; a few may have been dropped."""

Values = Mapping[str, Sequence[float]]


READABLE = 0.1
"""Share of readable confidences below which answers have no figures of confidence and calibration.

An unreadable confidence counts as the worst one, as in the rewards."""


def is_readable(confidences: ArrayLike) -> bool:
    """Whether enough of some confidences, nan where unreadable, can be read for figures of them."""
    return bool(np.mean(~np.isnan(np.asarray(confidences, dtype=np.float64))) >= READABLE)


def read_pairs(payload: Mapping[str, Any]) -> tuple[Floats, Floats | None] | None:
    """`[n]` labels and confidences of a recorded evaluation, where an unreadable one counts as the
    worst; None in place of the confidences if too few can be read, and of both without labels."""
    if not payload.get("problem_ids") or not payload.get("correct"):
        return None
    y = np.array(payload["correct"], dtype=np.float64)
    found = np.array(payload.get("confidence") or [], dtype=np.float64)  # None becomes nan
    return convert_to_pairs(y, found) if len(found) and is_readable(found) else (y, None)


@dataclass(frozen=True, slots=True)
class EvaluationAnswers:
    """The answers of one evaluation: problem ids, and values by name of `FIGURES`."""

    problems: tuple[str, ...]
    values: Values

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any] | None) -> Self | None:
        """Reads the payload of a recorded evaluation; None if ids or labels are missing. An
        unreadable confidence counts as the worst."""
        kept = payload or {}
        if (pairs := read_pairs(kept)) is None:
            return None
        y, stated = pairs
        values: dict[str, Sequence[float]] = {"accuracy": y.tolist()}
        if stated is not None:
            values["mean_confidence"] = stated.tolist()
            values["brier"] = ((stated - y) ** 2).tolist()
            values["nll"] = compute_clipped_losses(y, stated).tolist()
        return cls(tuple(kept["problem_ids"]), values)


@dataclass(frozen=True, slots=True)
class ProblemDifference:
    """Difference of a metric between two recipes, over their common problems.

    Attributes:
        seeds: the common seeds, whose answers are compared; empty if there are none, and the
            answers of all seeds are.
        mean: over problems, of the difference between the recipes' mean values. Problems with more
            answers weigh more, as in the metrics of an evaluation.
        low, high: 95 % interval, by bootstrap over problems.
        p: of `compute_permutation_p_value`, over problems.
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
    """Compares the answers of two recipes, by the run's seed, to the same problems: `one` minus
    `other` for each metric that both have; None if they have different problems. Only problems are
    resampled; the trained models are fixed.

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
            answers: list[dict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
            for side, own in zip(sides, answers, strict=True):
                for evaluation in side:
                    values = evaluation.values[figure]
                    for id_, value in zip(evaluation.problems, values, strict=True):
                        own[id_].append(value)
            ours, theirs = (np.array([np.mean(own[id_]) for id_ in shared]) for own in answers)
            counts = [np.array([len(own[id_]) for id_ in shared]) for own in answers]
            # Each problem's share of both sides' answers, as whole numbers.
            weights = counts[0] * counts[1].sum() + counts[1] * counts[0].sum()
            weights = (weights // np.gcd.reduce(weights)).astype(np.float64)
            gaps = weights * (ours - theirs)
            drawn = _bootstrap(
                (gaps, weights),
                lambda gap, weight, axis: gap.sum(axis=axis) / weight.sum(axis=axis),
                seed=0,
                draws=RESAMPLES,
                paired=True,
            )
            low, high = map(float, drawn.confidence_interval)
            mean = float(gaps.sum() / weights.sum())
            found[figure] = ProblemDifference(
                len(shared), seeds, mean, low, high, compute_permutation_p_value(gaps)
            )
    return found
