"""Calibration metrics of stated confidences.

A policy whose confidence depends only on the kind of problem can look perfectly calibrated.
`measure_calibration` therefore also reports the scores of a predictor that knows only the problem's
stratum, the metrics within each stratum, and how varied the confidences are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rlx.evaluation.scores import (
    build_reliability_bins,
    compute_accuracy_at_coverage,
    compute_aurc,
    compute_auroc,
    compute_brier,
    compute_brier_skill,
    compute_clipped_losses,
    compute_confidence_entropy,
    compute_coverage_at_risk,
    compute_debiased_ece,
    compute_equal_mass_ece,
    compute_error_auprc,
    compute_excess_aurc,
    compute_expected_calibration_error,
    compute_extreme_share,
    compute_maximum_calibration_error,
    compute_murphy_decomposition,
    compute_one_bit_auroc,
    compute_recalibrated_brier,
    compute_within_auroc,
    convert_to_pairs,
    select_risk_points,
    stratum_predictor,
)

COVERAGES = (0.5, 0.8, 0.9)
RISKS = (0.05, 0.1)


def measure_calibration(
    correct: ArrayLike,
    confidence: ArrayLike,
    stratum: Sequence[str] | None = None,
    problems: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Computes all calibration metrics, as plain JSON: undefined ones are None, never nan.

    Args:
        correct: `[n]` of 0 or 1.
        confidence: `[n]` in [0, 1]; nan if unparsable.
        stratum: `[n]` labels known before answering; None puts all in one stratum.
        problems: `[n]` the problem of each answer; None if all differ.

    Returns:
        * `n` pairs; `unparsable` of them without a readable confidence, which counts as the worst
          one; `readable_share`, the adherence to the format; `accuracy`; `mean_confidence`;
          `signed_gap`, their difference, positive where overconfident.
        * `brier`; `brier_skill`, 1 - brier / (base rate's Brier); `brier_recalibrated`, after an
          increasing map that is fitted on other problems; `murphy`, its decomposition; `nll`,
          clipped at .001, in nats.
        * `ece`, 10 equal-width bins; `ece_15`; `ece_mass`, 10 bins of about equal counts;
          `ece_debiased`, without the part that comes from having few answers per bin; `mce`, the
          largest gap of the 10 bins; the `bins` themselves.
        * `auroc`; `auroc_one_bit`, of whether the confidence is at least .5: near `auroc`, the
          confidence says no more than yes or no; `within_auroc`, among answers to problems of the
          same stratum: what it knows beyond the kind of problem; `auprc_error`, average precision
          of detecting errors.
        * `aurc`, area under the risk-coverage curve, averaged over ties; `e_aurc`, its excess over
          the best order; `accuracy_at`, over the most confident 50, 80 and 90 %, by coverage;
          `coverage_at`, the largest coverage with at most 5 and 10 % wrong, by risk;
          `risk_coverage`, (coverage, risk) at up to 50 evenly spaced coverages.
        * `distinct_share`, distinct values / n; `extreme_share`, within .01 of 0 or 1; `entropy`,
          of the histogram over the 10 bins, in nats.
        * `stratum_brier` and `stratum_auroc`, of predicting each stratum's accuracy in these data:
          an `auroc` near it means that the confidence reflects only the kind of problem;
          `by_stratum`, metrics within each stratum, by its label.

    Raises:
        ValueError: no samples, different lengths, or values out of range.
    """
    y, c = convert_to_pairs(correct, confidence)
    labels = np.full(len(y), "") if stratum is None else np.asarray(stratum, dtype=np.str_)
    known = stratum_predictor(y, labels)
    unparsable = int(np.isnan(np.asarray(confidence, dtype=np.float64)).sum())
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
        "extreme_share": compute_extreme_share(c),
        "entropy": compute_confidence_entropy(c),
        "stratum_brier": compute_brier(y, known),
        "stratum_auroc": compute_auroc(y, known),
        "bins": build_reliability_bins(y, c),
        "risk_coverage": select_risk_points(y, c),
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
