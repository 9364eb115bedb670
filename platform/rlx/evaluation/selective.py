"""Selective prediction: risk and coverage when answering only above a confidence threshold.

Equal confidences have no defined order. `ties="expected"` averages over all their orders, so the
order of the samples does not matter; "stable" keeps the order of the samples.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from rlx.evaluation.scores import Floats, convert_to_pairs

__all__ = [
    "compute_accuracy_at_coverage",
    "compute_aurc",
    "compute_coverage_at_risk",
    "compute_error_auprc",
    "compute_excess_aurc",
    "compute_risk_coverage",
    "select_risk_points",
]

Ties = Literal["expected", "stable"]


def compute_risk_coverage(
    correct: ArrayLike, confidence: ArrayLike, *, ties: Ties = "expected"
) -> Floats:
    """Share of wrong answers among the k most confident, for k = 1..n.

    Args:
        correct: `[n]` of 0 or 1.
        confidence: `[n]` in [0, 1]; nan counts as 0.
        ties: "expected" averages over all orders of equal confidences, so the order of the samples
            does not matter; "stable" keeps the order of the samples.

    Returns:
        `[n]`; the last one is 1 - accuracy.

    Reference:
        Geifman and El-Yaniv, "Selective classification for deep neural networks", 2017.
    """
    y, c = convert_to_pairs(correct, confidence)
    wrong = 1 - y
    if ties == "expected":
        _, slot, counts = np.unique(c, return_inverse=True, return_counts=True)
        wrong = (np.bincount(slot, weights=wrong) / counts)[slot]
    falling = np.argsort(-c, kind="stable")
    risk: Floats = np.cumsum(wrong[falling]) / np.arange(1, len(y) + 1)
    return risk


def select_risk_points(
    correct: ArrayLike, confidence: ArrayLike, points: int = 50
) -> tuple[tuple[float, float], ...]:
    """(coverage, risk) at up to `points` evenly spaced coverages, for plotting."""
    risk = compute_risk_coverage(correct, confidence)
    n = len(risk)
    ranks = np.unique(np.ceil(np.arange(1, points + 1) * n / points).astype(int))
    return tuple((float(k / n), float(risk[k - 1])) for k in ranks)


def compute_aurc(correct: ArrayLike, confidence: ArrayLike, *, ties: Ties = "expected") -> float:
    """Area under the risk-coverage curve: the mean of `compute_risk_coverage`. Lower is better."""
    return float(compute_risk_coverage(correct, confidence, ties=ties).mean())


def compute_accuracy_at_coverage(
    correct: ArrayLike, confidence: ArrayLike, coverage: float, *, ties: Ties = "expected"
) -> float:
    """Accuracy over the `ceil(coverage · n)` most confident answers.

    Raises:
        ValueError: coverage is not in (0, 1].
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage is {coverage}; it must lie in (0, 1]")
    risk = compute_risk_coverage(correct, confidence, ties=ties)
    # Round before the ceiling, else 0.07 · 100 = 7.000000000000001 would give 8 answers.
    return float(1 - risk[int(np.ceil(round(coverage * len(risk), 9))) - 1])


def compute_excess_aurc(
    correct: ArrayLike, confidence: ArrayLike, *, ties: Ties = "expected"
) -> float:
    """E-AURC: excess AURC over the best order, which ranks all correct answers first.

    The best order's area is exact for these n answers, not its limit r + (1 - r) ln(1 - r).

    Reference:
        Geifman, Uziel and El-Yaniv, "Bias-reduced uncertainty estimation for deep neural
        classifiers", 2019.
    """
    y, _ = convert_to_pairs(correct, confidence)
    return compute_aurc(correct, confidence, ties=ties) - compute_aurc(y, y)


def compute_coverage_at_risk(correct: ArrayLike, confidence: ArrayLike, risk: float) -> float:
    """The largest share of answers that a threshold can keep with at most `risk` of them wrong.

    A threshold keeps equal confidences together, so ties need no order. 0 if no threshold works.

    Raises:
        ValueError: risk is not in [0, 1].
    """
    if not 0 <= risk <= 1:
        raise ValueError(f"risk is {risk}; it must lie in [0, 1]")
    y, c = convert_to_pairs(correct, confidence)
    values, slot, counts = np.unique(c, return_inverse=True, return_counts=True)
    kept = np.cumsum(counts[::-1])
    wrong = np.cumsum(np.bincount(slot, weights=1 - y, minlength=len(values))[::-1])
    # Counts are integers, so only risk · kept has a rounding error.
    fits = wrong <= risk * kept + 1e-9
    return float(kept[fits].max() / len(y)) if fits.any() else 0.0


def compute_error_auprc(correct: ArrayLike, confidence: ArrayLike) -> float | None:
    """Average precision of detecting wrong answers by low confidence; None when labels are equal.

    Reference:
        Hendrycks and Gimpel, "A baseline for detecting misclassified and out-of-distribution
        examples in neural networks", 2017 (AUPR-Error).
    """
    y, c = convert_to_pairs(correct, confidence)
    if y.min() == y.max():
        return None
    _, slot, counts = np.unique(c, return_inverse=True, return_counts=True)
    wrong = np.bincount(slot, weights=1 - y)
    precision = np.cumsum(wrong) / np.cumsum(counts)
    return float(wrong @ precision / wrong.sum())
