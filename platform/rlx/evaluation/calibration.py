"""Calibration metrics of stated confidences.

A policy whose confidence depends only on the kind of problem can look perfectly calibrated.
`Calibration` therefore also reports the scores of a predictor that knows only the problem's
stratum, the metrics within each stratum, and how varied the confidences are.

"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from rlx.evaluation.scores import (
    Floats,
    MurphyDecomposition,
    ReliabilityBin,
    build_reliability_bins,
    compute_accuracy_at_coverage,
    compute_aurc,
    compute_auroc,
    compute_brier,
    compute_brier_skill,
    compute_clipped_nll,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StratumCalibration:
    """Metrics within one stratum; `auroc` is None if all labels are equal."""

    n: int
    accuracy: float
    mean_confidence: float
    brier: float
    ece: float
    auroc: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All calibration metrics of one set of (correct, confidence) pairs.

    Attributes:
        n: number of pairs.
        unparsable: number of pairs without a readable confidence (counted as confidence 0).
        readable_share: share with a readable confidence: adherence to the format.
        brier_skill: 1 - brier / (base rate's Brier); None when all labels are equal.
        brier_recalibrated: Brier score after an increasing map, fitted on other problems; None with
            fewer than two problems.
        nll: clipped at .001, in nats.
        ece: 10 equal-width bins; `ece_15`: 15 bins; `ece_mass`: 10 bins of about equal counts.
        ece_debiased: `ece` minus the part that comes from having few answers per bin.
        mce: the largest gap of the 10 bins.
        signed_gap: mean confidence minus accuracy; positive means overconfident.
        auroc: None when all labels are equal.
        auroc_one_bit: AUROC of whether the confidence is at least .5; an `auroc` near it means that
            the confidence says no more than yes or no.
        within_auroc: AUROC among answers to problems of the same stratum: what the confidence knows
            beyond the kind of problem. None if no stratum has both labels.
        auprc_error: average precision of detecting errors; None when all labels are equal.
        aurc: area under the risk-coverage curve, averaged over ties; `e_aurc`: excess over the
            best order.
        accuracy_at: accuracy over the most confident 50, 80 and 90 %, by coverage.
        coverage_at: the largest coverage with at most 5 and 10 % wrong, by risk.
        distinct_share: distinct confidence values / n.
        extreme_share: share within .01 of 0 or 1.
        entropy: entropy of the histogram over the 10 bins, in nats; 0 if all are in one bin.
        stratum_brier: Brier score of predicting each stratum's accuracy in these data.
        stratum_auroc: its AUROC. An `auroc` near it means that the confidence reflects only the
            kind of problem.
        bins: the 10 bins.
        risk_coverage: (coverage, risk) at up to 50 evenly spaced coverages, for plotting.
        by_stratum: metrics within each stratum, by its label.
    """

    n: int
    unparsable: int
    readable_share: float
    accuracy: float
    mean_confidence: float
    signed_gap: float
    brier: float
    brier_skill: float | None
    brier_recalibrated: float | None
    murphy: MurphyDecomposition
    nll: float
    ece: float
    ece_15: float
    ece_mass: float
    ece_debiased: float | None
    mce: float
    auroc: float | None
    auroc_one_bit: float | None
    within_auroc: float | None
    auprc_error: float | None
    aurc: float
    e_aurc: float
    accuracy_at: Mapping[str, float]
    coverage_at: Mapping[str, float]
    distinct_share: float
    extreme_share: float
    entropy: float
    stratum_brier: float
    stratum_auroc: float | None
    bins: tuple[ReliabilityBin, ...]
    risk_coverage: tuple[tuple[float, float], ...] | None
    by_stratum: Mapping[str, StratumCalibration]

    @classmethod
    def measure(
        cls,
        correct: ArrayLike,
        confidence: ArrayLike,
        stratum: Sequence[str] | None = None,
        problems: Sequence[str] | None = None,
    ) -> Self:
        """Computes all metrics.

        Args:
            correct: `[n]` of 0 or 1.
            confidence: `[n]` in [0, 1]; nan if unparsable.
            stratum: `[n]` labels known before answering; None puts all in one stratum.
            problems: `[n]` the problem of each answer; None if all differ.

        Raises:
            ValueError: no samples, different lengths, or values out of range.
        """
        y, c = convert_to_pairs(correct, confidence)
        labels = np.full(len(y), "") if stratum is None else np.asarray(stratum, dtype=np.str_)
        known = stratum_predictor(y, labels)
        unparsable = int(np.isnan(np.asarray(confidence, dtype=np.float64)).sum())
        return cls(
            n=len(y),
            unparsable=unparsable,
            readable_share=1 - unparsable / len(y),
            accuracy=float(y.mean()),
            mean_confidence=float(c.mean()),
            signed_gap=float(c.mean() - y.mean()),
            brier=compute_brier(y, c),
            brier_skill=compute_brier_skill(y, c),
            brier_recalibrated=compute_recalibrated_brier(y, c, problems),
            murphy=compute_murphy_decomposition(y, c),
            nll=compute_clipped_nll(y, c),
            ece=compute_expected_calibration_error(y, c),
            ece_15=compute_expected_calibration_error(y, c, bins=15),
            ece_mass=compute_equal_mass_ece(y, c),
            ece_debiased=compute_debiased_ece(y, c),
            mce=compute_maximum_calibration_error(y, c),
            auroc=compute_auroc(y, c),
            auroc_one_bit=compute_one_bit_auroc(y, c),
            within_auroc=compute_within_auroc(y, c, labels),
            auprc_error=compute_error_auprc(y, c),
            aurc=compute_aurc(y, c),
            e_aurc=compute_excess_aurc(y, c),
            accuracy_at={f"{q:g}": compute_accuracy_at_coverage(y, c, q) for q in COVERAGES},
            coverage_at={f"{r:g}": compute_coverage_at_risk(y, c, r) for r in RISKS},
            distinct_share=len(np.unique(c)) / len(c),
            extreme_share=compute_extreme_share(c),
            entropy=compute_confidence_entropy(c),
            stratum_brier=compute_brier(y, known),
            stratum_auroc=compute_auroc(y, known),
            bins=build_reliability_bins(y, c),
            risk_coverage=select_risk_points(y, c),
            by_stratum={
                str(s): _compute_stratum_calibration(y[labels == s], c[labels == s])
                for s in np.unique(labels)
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; undefined metrics are None, never nan."""
        drawn = None if self.risk_coverage is None else [list(p) for p in self.risk_coverage]
        plain = {"bins": [asdict(b) for b in self.bins], "risk_coverage": drawn}
        return {**asdict(self), **plain}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; other keys are ignored.

        Metrics missing from an older record are None.
        """
        strata = record["by_stratum"].items()
        drawn = record.get("risk_coverage")
        values: dict[str, Any] = {
            **{field.name: record.get(field.name) for field in fields(cls)},
            "murphy": MurphyDecomposition(**record["murphy"]),
            "bins": tuple(ReliabilityBin(**b) for b in record["bins"]),
            "risk_coverage": None if drawn is None else tuple((c, r) for c, r in drawn),
            "by_stratum": {label: StratumCalibration(**figures) for label, figures in strata},
        }
        return cls(**values)


def _compute_stratum_calibration(y: Floats, c: Floats) -> StratumCalibration:
    return StratumCalibration(
        n=len(y),
        accuracy=float(y.mean()),
        mean_confidence=float(c.mean()),
        brier=compute_brier(y, c),
        ece=compute_expected_calibration_error(y, c),
        auroc=compute_auroc(y, c),
    )
