"""Histograms of rewards and lengths: the turns of a step, also while a run is active."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlx_registry import Registry

__all__ = ["build_distributions", "build_histogram"]

BARS = 24


def build_distributions(
    registry: Registry, run_id: str, steps: Sequence[int]
) -> list[dict[str, Any]]:
    """Histograms of reward and length by kind of turn, at the first and the newest step.

    Args:
        registry: holds the run.
        run_id: id of the run.
        steps: steps with recorded rollouts, ascending.
    """
    ends = list(dict.fromkeys((*steps[:1], *steps[-1:])))
    rows = {step: registry.queries.turn_sizes(run_id, step) for step in ends}
    kinds = dict.fromkeys(kind for step in ends for kind, *_ in rows[step])
    made = []
    for kind in kinds:
        own = {step: [row for row in rows[step] if row[0] == kind] for step in ends}
        rewards = {step: [r for _, r, _ in own[step] if r is not None] for step in ends}
        lengths = {step: [float(n) for *_, n in own[step]] for step in ends}
        made.append(
            {"kind": kind, "reward": build_histogram(rewards), "tokens": build_histogram(lengths)}
        )
    return made


def build_histogram(values: dict[int, list[float]]) -> dict[str, Any]:
    """Histograms of several steps over one range, so that they can be compared.

    Args:
        values: finite and other values by step; only the finite ones count.

    Returns:
        `low` and `high` of the range, and for each step `n`, `mean`, `std` and the bars' `shares`.
    """
    finite = {step: [v for v in some if math.isfinite(v)] for step, some in values.items()}
    everything = [v for some in finite.values() for v in some]
    low, high = min(everything, default=0.0), max(everything, default=0.0)
    bars = BARS if high > low else 1
    return {
        "low": low,
        "high": high,
        "steps": [
            {
                "step": step,
                "n": len(some),
                **_compute_moments(some),
                "shares": _share_bars(some, low, high, bars),
            }
            for step, some in finite.items()
        ],
    }


def _compute_moments(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and σ; None of no values."""
    if not values:
        return {"mean": None, "std": None}
    mean = fmean(values)
    return {"mean": mean, "std": math.sqrt(fmean((v - mean) ** 2 for v in values))}


def _share_bars(values: Sequence[float], low: float, high: float, bars: int) -> list[float]:
    """The share of the values in each of `bars` equal parts of the range."""
    counts = [0] * bars
    for value in values:
        part = (value - low) / (high - low) if high > low else 0.0
        counts[min(int(part * bars), bars - 1)] += 1
    return [count / max(len(values), 1) for count in counts]
