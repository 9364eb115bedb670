"""Bootstrap confidence intervals over problems."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["DRAWS", "compute_bootstrap_intervals"]

DRAWS = 1000
LEVEL = 0.95
LEAST_DEFINED = 0.9
"""Minimum share of resamples in which a metric must be defined to get an interval."""

Index = NDArray[np.intp]


def compute_bootstrap_intervals(
    groups: Sequence[Hashable],
    measures: Mapping[str, Callable[[Index], float | None]],
    *,
    seed: int,
    draws: int = DRAWS,
) -> dict[str, tuple[float, float] | None]:
    """95 % percentile bootstrap intervals of metrics over grouped samples.

    Whole groups are drawn with replacement, since answers to one problem are not independent.

    Args:
        groups: `[n]` the problem of each sample.
        measures: functions from sample positions, possibly repeated, to a metric; None if it is
            undefined.
        seed: seed of the resamples, which all measures share.
        draws: number of resamples.

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
    rng = np.random.default_rng(seed)
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(draws):
        chosen = np.concatenate(
            [together[g] for g in rng.integers(len(together), size=len(together))]
        )
        for name, measure in measures.items():
            value = measure(chosen)
            if value is not None:
                found[name].append(value)
    return {name: _compute_percentile_interval(values, draws) for name, values in found.items()}


def _compute_percentile_interval(values: Sequence[float], draws: int) -> tuple[float, float] | None:
    if len(values) < LEAST_DEFINED * draws:
        return None
    low, high = np.quantile(np.asarray(values), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return low, high
