"""Which of two recipes is better: means over seeds, and differences between runs that share one."""

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
]

LEVEL = 0.95
EXACT_UP_TO = 12
"""Pairs up to which every change of signs is counted; beyond, scipy samples them."""
RESAMPLES = 9999
TINY = 1e-12


@dataclass(frozen=True, slots=True)
class SeedMean:
    """A figure over seeds.

    Attributes:
        n: seeds.
        std: with n - 1; None for one seed, as are
        low, high: ends of the 95 % interval of Student's t.
    """

    n: int
    mean: float
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class SeedDifference:
    """A figure of one recipe minus that of another, seed by seed.

    Attributes:
        over: the mean difference, with its interval.
        p: share of all changes of sign whose mean is at least as far from 0: the exact paired
            permutation test. With n seeds it is never below 2 / 2ⁿ.
    """

    over: SeedMean
    p: float


def compute_seed_mean(values: Sequence[float]) -> SeedMean:
    """Mean, spread and 95 % interval of independent runs.

    Raises:
        ValueError: there are none.

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
    """Compares two recipes over the seeds that both were run with.

    Args:
        one, other: a figure by seed.

    Returns:
        None where they share no seed.

    Reference:
        Fisher, "The design of experiments", 1935, section 21.
    """
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    gaps = np.array([one[seed] - other[seed] for seed in shared])
    return SeedDifference(compute_seed_mean(gaps.tolist()), compute_permutation_p_value(gaps))


def compute_permutation_p_value(gaps: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """The paired permutation test of whether differences have no direction, on both sides.

    Args:
        gaps: `[n]` differences, each with its weight.

    Returns:
        Share of all changes of sign whose mean is at least as far from 0. Differences of exactly 0
        have no sign to change; beyond `EXACT_UP_TO` others, `RESAMPLES` changes stand for all.
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
