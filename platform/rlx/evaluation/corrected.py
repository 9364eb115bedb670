"""Figures that correct what flatters a calibration figure: the bias of ECE, confidences of one bit,
and scores that a recalibration would give.
"""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlx.evaluation.scores import (
    Floats,
    build_reliability_bins,
    compute_auroc,
    compute_brier,
    convert_to_pairs,
)

__all__ = [
    "compute_debiased_ece",
    "compute_one_bit_auroc",
    "compute_recalibrated_brier",
    "halve_problems",
    "recalibrate_confidences",
]

THRESHOLD = 0.5


def compute_debiased_ece(correct: ArrayLike, confidence: ArrayLike, *, bins: int = 10) -> float:
    """ECE minus the part of it that comes from having few answers per bin; never below 0.

        Σ_b n_b/n (2 |g_b| - E|g_b + σ_b Z|)        g_b = c̄_b - ȳ_b, σ_b² = ȳ_b (1 - ȳ_b) / n_b

    The accuracy of a bin is noisy, and noise always adds to |g_b|. With a standard normal Z, the
    expected addition has a closed form. A bin whose answers are all right or all wrong is not
    corrected.

    Args:
        correct: `[n]` of 0 or 1.
        confidence: `[n]` in [0, 1]; nan counts as 0.
        bins: number of bins, as in `compute_expected_calibration_error`.

    Reference:
        Kumar, Liang and Ma, "Verified uncertainty calibration", arXiv 1909.10155, and the
        estimator of their code for absolute gaps.
    """
    from scipy.special import ndtr

    total, corrected = 0, 0.0
    for one in build_reliability_bins(correct, confidence, bins=bins):
        if one.confidence is None or one.accuracy is None:
            continue
        gap = abs(one.confidence - one.accuracy)
        noise = float(np.sqrt(one.accuracy * (1 - one.accuracy) / one.n))
        noisy = gap
        if noise > 0:
            z = gap / noise
            noisy = noise * np.sqrt(2 / np.pi) * np.exp(-(z**2) / 2) + gap * (1 - 2 * ndtr(-z))
        total += one.n
        corrected += one.n * (2 * gap - float(noisy))
    return max(0.0, corrected / total)


def compute_one_bit_auroc(correct: ArrayLike, confidence: ArrayLike) -> float | None:
    """AUROC of whether the confidence is at least .5; None when all labels are equal.

    A confidence whose AUROC is no higher says no more than yes or no.
    """
    y, c = convert_to_pairs(correct, confidence)
    return compute_auroc(y, (c >= THRESHOLD).astype(np.float64))


def compute_recalibrated_brier(
    correct: ArrayLike, confidence: ArrayLike, problems: Sequence[str] | None = None
) -> float | None:
    """Brier score of `recalibrate_confidences`, with its arguments; None where that is None.

    What remains is mostly a lack of discrimination, since no map can mend that.
    """
    mapped = recalibrate_confidences(correct, confidence, problems)
    return None if mapped is None else compute_brier(correct, mapped)


def halve_problems(problems: Sequence[str]) -> NDArray[np.bool_]:
    """`[n]` bool the answers to about half of the problems, whatever their order."""
    return np.array([zlib.crc32(problem.encode()) % 2 == 1 for problem in problems])


def recalibrate_confidences(
    correct: ArrayLike, confidence: ArrayLike, problems: Sequence[str] | None = None
) -> Floats | None:
    """Confidences after an increasing map that is fitted on other problems.

    Each half of the problems gets the map that isotonic regression fits on the other half.

    Args:
        correct: `[n]` of 0 or 1.
        confidence: `[n]` in [0, 1]; nan counts as 0.
        problems: `[n]` id of each answer's problem, which stay together; None if all differ.

    Returns:
        `[n]`; None if a half is empty, as with a single problem.

    Reference:
        Zadrozny and Elkan, "Transforming classifier scores into accurate multiclass probability
        estimates", 2002 (isotonic regression).
    """
    # Imported here because it takes half a second.
    from scipy.optimize import isotonic_regression

    y, c = convert_to_pairs(correct, confidence)
    half = _halve_answers(y, c) if problems is None else halve_problems(problems)
    if half.all() or not half.any():
        return None
    mapped: Floats = np.zeros_like(c)
    for test in (half, ~half):
        values, slot, counts = np.unique(c[~test], return_inverse=True, return_counts=True)
        shares = np.bincount(slot, weights=y[~test]) / counts
        mapped[test] = np.interp(c[test], values, isotonic_regression(shares, weights=counts).x)
    return mapped


def _halve_answers(y: Floats, c: Floats) -> NDArray[np.bool_]:
    """`[n]` bool every second answer, in order of confidence."""
    half = np.zeros(len(y), dtype=bool)
    half[np.lexsort((y, c))[1::2]] = True
    return half
