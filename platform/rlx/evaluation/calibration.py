"""Calibration metrics of stated confidences: functions of (correct, confidence).

`correct` is `[n]` of 0 or 1, `confidence` `[n]` in [0, 1]; ValueError for no samples, different
lengths, or values out of range. Conventions hold throughout:

* **Bins** have equal width, `[i/B, (i+1)/B)`, and the last one is closed. An edge is the double
  nearest to `i/B`, so 0.3 lies in bin 3 and 0.7 in bin 7. (The fourth edge of `numpy.linspace` is
  0.30000000000000004.)
* **Unreadable confidences** are passed as nan and count as the worst one, 1 for a wrong answer
  and 0 for a right one, as in the rewards: a policy gains nothing by stating none.
* **Equal confidences** have no order: figures average over all of theirs.
"""

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
CLIP = 0.001
"""Confidences are clipped to this distance from 0 and 1 before taking logarithms."""


# Proper scoring rules ----------------------------------------------------------------------------
def compute_brier(correct: ArrayLike, confidence: ArrayLike) -> float:
    """Mean squared error of the confidence: 1/n Σᵢ (cᵢ - yᵢ)².

    Reference:
        Brier, "Verification of forecasts expressed in terms of probability", 1950.
    """
    y, c = convert_to_pairs(correct, confidence)
    return float(np.mean((c - y) ** 2))


def compute_brier_skill(correct: ArrayLike, confidence: ArrayLike) -> float | None:
    """BSS = 1 - BS / (ȳ (1 - ȳ)), relative to the base rate; None when all labels are equal."""
    y, c = convert_to_pairs(correct, confidence)
    uncertainty = float(y.mean() * (1 - y.mean()))
    return None if uncertainty == 0 else 1 - compute_brier(y, c) / uncertainty


def compute_murphy_decomposition(correct: ArrayLike, confidence: ArrayLike) -> dict[str, float]:
    """Exact decomposition of the Brier score over the distinct confidence values v: reliability -
    resolution + uncertainty. Lower reliability is better. Uninformative if nearly all confidences
    are distinct: resolution then approaches uncertainty.

        reliability = Σᵥ nᵥ/n (v - ȳᵥ)²
        resolution  = Σᵥ nᵥ/n (ȳᵥ - ȳ)²
        uncertainty = ȳ (1 - ȳ)

    Reference:
        Murphy, "A new vector partition of the probability score", 1973.
    """
    y, c = convert_to_pairs(correct, confidence)
    values, slot, counts = np.unique(c, return_inverse=True, return_counts=True)
    share = counts / len(y)
    observed = np.bincount(slot, weights=y) / counts
    mean = y.mean()
    return {
        "reliability": float(np.sum(share * (values - observed) ** 2)),
        "resolution": float(np.sum(share * (observed - mean) ** 2)),
        "uncertainty": float(mean * (1 - mean)),
    }


def compute_clipped_losses(correct: ArrayLike, confidence: ArrayLike) -> Floats:
    """`[n]` negative log-likelihoods in nats, of clipped confidences: a mistake costs at most
    6.9."""
    y, c = convert_to_pairs(correct, confidence)
    sure = np.clip(np.where(y == 1, c, 1 - c), CLIP, 1 - CLIP)
    losses: Floats = -np.log(sure)
    return losses


# Calibration in bins -----------------------------------------------------------------------------
def build_reliability_bins(
    correct: ArrayLike, confidence: ArrayLike, *, bins: int = 10
) -> list[dict[str, Any]]:
    """Answers in each equal-width bin, as plain JSON: its edges, the number `n` of its answers,
    their mean `confidence` and `accuracy`, and the ends of its 95 % Wilson interval; None in an
    empty bin."""
    y, c = convert_to_pairs(correct, confidence)
    slot, edges = _find_bins(c, bins), (np.arange(bins + 1) / bins).tolist()
    found = []
    for i, (low, high) in enumerate(pairwise(edges)):
        own_y, own_c = y[slot == i], c[slot == i]
        figures: tuple[float | None, ...] = (None,) * 4
        if n := len(own_y):
            interval = compute_wilson_interval(int(own_y.sum()), n)
            figures = (float(own_c.mean()), float(own_y.mean()), *interval)
        names = ("confidence", "accuracy", "accuracy_low", "accuracy_high")
        found.append({"low": low, "high": high, "n": n, **dict(zip(names, figures, strict=True))})
    return found


def compute_expected_calibration_error(
    correct: ArrayLike, confidence: ArrayLike, *, bins: int = 10
) -> float:
    """Mean gap between confidence and accuracy over bins: Σ_b n_b/n |c̄_b - ȳ_b|.

    Reference:
        Naeini et al., "Obtaining well calibrated probabilities using Bayesian binning", 2015.
    """
    y, c = convert_to_pairs(correct, confidence)
    weight, gap = _compute_bin_gaps(y, c, _find_bins(c, bins))
    return float(np.sum(weight * gap))


def compute_equal_mass_ece(correct: ArrayLike, confidence: ArrayLike, *, bins: int = 10) -> float:
    """ECE over bins with about n / bins samples each: a sample lies in bin `⌊bins · F⌋`, where F is
    the share of samples with a smaller confidence, so that equal confidences share a bin.

    Reference:
        Nixon et al., "Measuring calibration in deep learning", 2019 (adaptive bins).
    """
    y, c = convert_to_pairs(correct, confidence)
    if bins < 1:
        raise ValueError(f"{bins} bins")
    smaller = np.searchsorted(np.sort(c), c, side="left")
    weight, gap = _compute_bin_gaps(y, c, bins * smaller // len(c))
    return float(np.sum(weight * gap))


def compute_maximum_calibration_error(
    correct: ArrayLike, confidence: ArrayLike, *, bins: int = 10
) -> float:
    """The largest gap of any non-empty bin: MCE = max_b |c̄_b - ȳ_b|."""
    y, c = convert_to_pairs(correct, confidence)
    return float(_compute_bin_gaps(y, c, _find_bins(c, bins))[1].max())


def compute_wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of a share, which lies in [0, 1] and never has width 0.

    Reference:
        Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    from scipy.stats import binomtest

    interval = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


# Ranking -----------------------------------------------------------------------------------------
def compute_auroc(correct: ArrayLike, confidence: ArrayLike) -> float | None:
    """Area under the ROC curve of the confidence; None when all labels are equal.

    P(c of a correct answer > c of a wrong one) + P(they are equal) / 2
    """
    y, c = convert_to_pairs(correct, confidence)
    if y.min() == y.max():
        return None
    _, slot = np.unique(c, return_inverse=True)
    right, wrong = np.bincount(slot, weights=y), np.bincount(slot, weights=1 - y)
    beaten = np.cumsum(wrong) - wrong / 2  # wrong answers with less, and half of those with as much
    return float(right @ beaten / (right.sum() * wrong.sum()))


def compute_within_auroc(
    correct: ArrayLike, confidence: ArrayLike, stratum: ArrayLike
) -> float | None:
    """AUROC within strata, averaged over pairs of answers; None if no stratum has both labels.

        Σ_s n⁺_s n⁻_s AUROC_s / Σ_s n⁺_s n⁻_s

    A predictor that knows only the stratum scores exactly .5.
    """
    y, c = convert_to_pairs(correct, confidence)
    labels = np.asarray(stratum)
    ranked, pairs = 0.0, 0.0
    for own in (labels == s for s in np.unique(labels)):
        inside = compute_auroc(y[own], c[own])
        if inside is not None:
            weight = float(y[own].sum() * (1 - y[own]).sum())
            ranked, pairs = ranked + weight * inside, pairs + weight
    return ranked / pairs if pairs else None


def stratum_predictor(correct: ArrayLike, stratum: ArrayLike) -> Floats:
    """`[n]` each sample's stratum accuracy, measured on the same data, as its confidence: the best
    that a predictor knowing only the stratum can do."""
    y, labels = np.asarray(correct, dtype=np.float64), np.asarray(stratum)
    if y.ndim != 1 or y.shape != labels.shape or not len(y):
        raise ValueError(f"correct has shape {y.shape}, stratum {labels.shape}")
    _, slot, counts = np.unique(labels, return_inverse=True, return_counts=True)
    mean: Floats = (np.bincount(slot, weights=y) / counts)[slot]
    return mean


# Helpers -----------------------------------------------------------------------------------------
def convert_to_pairs(correct: ArrayLike, confidence: ArrayLike) -> tuple[Floats, Floats]:
    """Returns both as validated float64 `[n]`, with nan replaced by the worst confidence, 1 - y."""
    stated = np.asarray(confidence)
    if stated.dtype == np.float32:
        # Convert via the shortest decimal: widening float32 0.7 would move it to another bin.
        stated = stated.astype(np.str_)
    y, c = np.asarray(correct, dtype=np.float64), stated.astype(np.float64)
    if c.ndim != 1 or not len(c):
        raise ValueError(f"confidence has shape {c.shape}; at least one sample is needed")
    if (c < 0).any() or (c > 1).any():
        raise ValueError("confidence has values outside [0, 1]")
    if y.shape != c.shape:
        raise ValueError(f"correct has shape {y.shape}, confidence {c.shape}")
    if not np.isin(y, (0.0, 1.0)).all():
        raise ValueError("correct has values other than 0 and 1")
    return y, np.where(np.isnan(c), 1 - y, c)


def _find_bins(c: Floats, bins: int) -> NDArray[np.intp]:
    if bins < 1:
        raise ValueError(f"{bins} bins")
    edges = np.arange(bins + 1) / bins
    return np.minimum(np.searchsorted(edges, c, side="right") - 1, bins - 1)


def _compute_bin_gaps(y: Floats, c: Floats, slot: NDArray[np.intp]) -> tuple[Floats, Floats]:
    """Share of samples and |confidence - accuracy| of the non-empty bins."""
    counts = np.bincount(slot)
    held = counts > 0
    gap = np.abs(np.bincount(slot, weights=c) - np.bincount(slot, weights=y))[held] / counts[held]
    return counts[held] / len(y), gap


Ties = Literal["expected", "stable"]


def compute_risk_coverage(
    correct: ArrayLike, confidence: ArrayLike, *, ties: Ties = "expected"
) -> Floats:
    """`[n]` share of wrong answers among the k most confident, for k = 1..n.

    Args:
        ties: "expected" averages over all orders of equal confidences; "stable" keeps the order of
            the samples.

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


def compute_aurc(correct: ArrayLike, confidence: ArrayLike, *, ties: Ties = "expected") -> float:
    """Area under the risk-coverage curve: the mean of `compute_risk_coverage`. Lower is better."""
    return float(compute_risk_coverage(correct, confidence, ties=ties).mean())


def compute_accuracy_at_coverage(
    correct: ArrayLike, confidence: ArrayLike, coverage: float, *, ties: Ties = "expected"
) -> float:
    """Accuracy over the `ceil(coverage · n)` most confident answers."""
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage is {coverage}; it must lie in (0, 1]")
    risk = compute_risk_coverage(correct, confidence, ties=ties)
    # Round before the ceiling, else 0.07 · 100 = 7.000000000000001 would give 8 answers.
    return float(1 - risk[int(np.ceil(round(coverage * len(risk), 9))) - 1])


def compute_excess_aurc(correct: ArrayLike, confidence: ArrayLike) -> float:
    """E-AURC: excess AURC over the best order of these n answers, which ranks all correct ones
    first.

    Reference:
        Geifman, Uziel and El-Yaniv, "Bias-reduced uncertainty estimation for deep neural
        classifiers", 2019.
    """
    y, _ = convert_to_pairs(correct, confidence)
    return compute_aurc(correct, confidence) - compute_aurc(y, y)


def compute_coverage_at_risk(correct: ArrayLike, confidence: ArrayLike, risk: float) -> float:
    """The largest share of answers that a threshold can keep with at most `risk` of them wrong; 0
    if no threshold works. A threshold keeps equal confidences together."""
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


THRESHOLD = 0.5


def compute_debiased_ece(correct: ArrayLike, confidence: ArrayLike, *, bins: int = 10) -> float:
    """ECE minus the part of it that comes from having few answers per bin; never below 0.

        Σ_b n_b/n (2 |g_b| - E|g_b + σ_b Z|)        g_b = c̄_b - ȳ_b, σ_b² = ȳ_b (1 - ȳ_b) / n_b

    Noise of a bin's accuracy always adds to |g_b|; with a standard normal Z the expected addition
    has a closed form. A bin whose answers are all right or all wrong is not corrected.

    Reference:
        Kumar, Liang and Ma, "Verified uncertainty calibration", arXiv 1909.10155, and the
        estimator of their code for absolute gaps.
    """
    from scipy.special import ndtr

    y, c = convert_to_pairs(correct, confidence)
    slot = _find_bins(c, bins)
    counts = np.bincount(slot)
    held = counts > 0
    n = counts[held]
    accuracy = np.bincount(slot, weights=y)[held] / n
    gap = np.abs(np.bincount(slot, weights=c)[held] / n - accuracy)
    noise = np.sqrt(accuracy * (1 - accuracy) / n)
    z = np.divide(gap, noise, out=np.zeros_like(gap), where=noise > 0)
    noisy = noise * np.sqrt(2 / np.pi) * np.exp(-(z**2) / 2) + gap * (1 - 2 * ndtr(-z))
    corrected = 2 * gap - np.where(noise > 0, noisy, gap)
    return max(0.0, float(n @ corrected / len(y)))


def compute_one_bit_auroc(correct: ArrayLike, confidence: ArrayLike) -> float | None:
    """AUROC of whether the confidence is at least .5; None when all labels are equal."""
    y, c = convert_to_pairs(correct, confidence)
    return compute_auroc(y, (c >= THRESHOLD).astype(np.float64))


def compute_recalibrated_brier(
    correct: ArrayLike, confidence: ArrayLike, problems: Sequence[str] | None = None
) -> float | None:
    """Brier score of `recalibrate_confidences`: mostly a lack of discrimination, which no map
    mends."""
    mapped = recalibrate_confidences(correct, confidence, problems)
    return None if mapped is None else compute_brier(correct, mapped)


def halve_problems(problems: Sequence[str]) -> NDArray[np.bool_]:
    """`[n]` bool the answers to about half of the problems, whatever their order."""
    return np.array([zlib.crc32(problem.encode()) % 2 == 1 for problem in problems])


def recalibrate_confidences(
    correct: ArrayLike, confidence: ArrayLike, problems: Sequence[str] | None = None
) -> Floats | None:
    """`[n]` confidences after an increasing map: each half of the problems gets the map that
    isotonic regression fits on the other half. None if a half is empty, as with a single problem.

    Args:
        problems: `[n]` id of each answer's problem, which stay together; None if all differ.

    Reference:
        Zadrozny and Elkan, "Transforming classifier scores into accurate multiclass probability
        estimates", 2002 (isotonic regression).
    """
    # Imported here because it takes half a second.
    from scipy.optimize import isotonic_regression

    y, c = convert_to_pairs(correct, confidence)
    if problems is None:  # every second answer, in order of confidence
        half = np.zeros(len(y), dtype=bool)
        half[np.lexsort((y, c))[1::2]] = True
    else:
        half = halve_problems(problems)
    if half.all() or not half.any():
        return None
    mapped: Floats = np.zeros_like(c)
    for test in (half, ~half):
        values, slot, counts = np.unique(c[~test], return_inverse=True, return_counts=True)
        shares = np.bincount(slot, weights=y[~test]) / counts
        mapped[test] = np.interp(c[test], values, isotonic_regression(shares, weights=counts).x)
    return mapped


COVERAGES = (0.5, 0.8, 0.9)
RISKS = (0.05, 0.1)


def measure_calibration(
    correct: ArrayLike,
    confidence: ArrayLike,
    stratum: Sequence[str] | None = None,
    problems: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Computes all calibration metrics, as plain JSON: undefined ones are None, never nan.
    docs/evaluation.md says what each is.

    Args:
        confidence: `[n]` in [0, 1]; nan if unparsable.
        stratum: `[n]` labels known before answering; None puts all in one stratum.
        problems: `[n]` the problem of each answer; None if all differ.
    """
    y, c = convert_to_pairs(correct, confidence)
    labels = np.full(len(y), "") if stratum is None else np.asarray(stratum, dtype=np.str_)
    known = stratum_predictor(y, labels)
    unparsable = int(np.isnan(np.asarray(confidence, dtype=np.float64)).sum())
    bins = np.bincount(_find_bins(c, 10)) / len(c)
    bins = bins[bins > 0]
    return {
        "n": len(y),
        "unparsable": unparsable,
        "readable_share": 1 - unparsable / len(y),
        "accuracy": float(y.mean()),
        "mean_confidence": float(c.mean()),
        "signed_gap": float(c.mean() - y.mean()),
        "brier": compute_brier(y, c),
        "brier_skill": compute_brier_skill(y, c),
        "brier_recalibrated": compute_recalibrated_brier(y, c, problems),
        "murphy": compute_murphy_decomposition(y, c),
        "nll": float(compute_clipped_losses(y, c).mean()),
        "ece": compute_expected_calibration_error(y, c),
        "ece_15": compute_expected_calibration_error(y, c, bins=15),
        "ece_mass": compute_equal_mass_ece(y, c),
        "ece_debiased": compute_debiased_ece(y, c),
        "mce": compute_maximum_calibration_error(y, c),
        "auroc": compute_auroc(y, c),
        "auroc_one_bit": compute_one_bit_auroc(y, c),
        "within_auroc": compute_within_auroc(y, c, labels),
        "auprc_error": compute_error_auprc(y, c),
        "aurc": compute_aurc(y, c),
        "e_aurc": compute_excess_aurc(y, c),
        "accuracy_at": {f"{q:g}": compute_accuracy_at_coverage(y, c, q) for q in COVERAGES},
        "coverage_at": {f"{r:g}": compute_coverage_at_risk(y, c, r) for r in RISKS},
        "distinct_share": len(np.unique(c)) / len(c),
        "extreme_share": float(np.mean((c <= 0.01) | (c >= 1 - 0.01))),
        "entropy": float(max(0.0, -np.sum(bins * np.log(bins)))),  # in nats, from 0 to ln 10
        "bins": build_reliability_bins(y, c),
        "stratum_brier": compute_brier(y, known),
        "stratum_auroc": compute_auroc(y, known),
        "by_stratum": {
            str(s): {
                "n": len(own := y[labels == s]),
                "accuracy": float(own.mean()),
                "mean_confidence": float(c[labels == s].mean()),
                "brier": compute_brier(own, c[labels == s]),
                "ece": compute_expected_calibration_error(own, c[labels == s]),
                "auroc": compute_auroc(own, c[labels == s]),
            }
            for s in np.unique(labels)
        },
    }
