"""Compare two recipes over seeds: means, and paired differences between runs of the same seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

__all__ = [
    "SeedDifference",
    "SeedMean",
    "compute_paired_difference",
    "compute_permutation_p_value",
    "compute_seed_mean",
    "correct_p_values",
]

LEVEL = 0.95
EXACT_UP_TO = 12
"""Maximum number of pairs for which all sign flips are enumerated; beyond, SciPy samples them."""
RESAMPLES = 9999
TINY = 1e-12


@dataclass(frozen=True, slots=True)
class SeedMean:
    """Mean of a metric over seeds.

    Attributes:
        n: number of seeds.
        mean: mean over seeds.
        std: sample standard deviation (n - 1); None for one seed.
        low, high: 95 % interval by Student's t; None for one seed.
    """

    n: int
    mean: float
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class SeedDifference:
    """Difference of a metric between two recipes, paired by seed.

    Attributes:
        over: the mean difference, with its interval.
        p: p-value of the exact paired permutation test: share of all sign flips whose mean is at
            least as far from 0. With n seeds it is at least 2 / 2ⁿ.
    """

    over: SeedMean
    p: float


def compute_seed_mean(values: Sequence[float]) -> SeedMean:
    """Mean, standard deviation and 95 % interval over independent runs.

    Raises:
        ValueError: `values` is empty.

    Reference:
        Student, "The probable error of a mean", 1908.
    """
    if not values:
        raise ValueError("no values")
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return SeedMean(1, mean, None, None, None)
    from scipy.stats import t

    std = float(np.std(values, ddof=1))
    half = float(t.ppf((1 + LEVEL) / 2, n - 1)) * std / math.sqrt(n)
    return SeedMean(n, mean, std, mean - half, mean + half)


def compute_paired_difference(
    one: Mapping[int, float], other: Mapping[int, float]
) -> SeedDifference | None:
    """Compares two recipes over their common seeds.

    Args:
        one, other: values of a metric by seed.

    Returns:
        `one` minus `other`; None if they share no seed.

    Reference:
        Fisher, "The design of experiments", 1935, section 21.
    """
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    gaps = np.array([one[seed] - other[seed] for seed in shared])
    return SeedDifference(compute_seed_mean(gaps.tolist()), compute_permutation_p_value(gaps))


def compute_permutation_p_value(gaps: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """Two-sided p-value of the paired permutation test that the mean difference is 0.

    Args:
        gaps: `[n]` differences, multiplied by their weights.

    Returns:
        Share of all sign flips whose mean is at least as far from 0. Differences of exactly 0 are
        dropped. With more than `EXACT_UP_TO` differences left, `RESAMPLES` random flips are used.
    """
    gaps = gaps[gaps != 0]
    if len(gaps) <= EXACT_UP_TO:
        signs = np.array(list(product((1, -1), repeat=len(gaps))))
        far = abs(float(gaps.sum())) - TINY
        return float((np.abs(signs @ gaps) >= far).mean()) if len(gaps) else 1.0
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
    """Corrects the p-values of a family of tests for their number.

    The corrected values bound the chance that any test of the family is wrongly significant,
    however the tests depend on each other.

    Args:
        p_values: one per test; None where a test was not made, which does not count.

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
