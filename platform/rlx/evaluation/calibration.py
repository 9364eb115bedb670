"""Does a stated confidence mean what it says? All figures of one evaluation, together.

A policy whose confidence depends on nothing but the kind of problem can look perfectly calibrated.
`Calibration` therefore carries, beside every figure, what a predictor scores that knows only the
problem's stratum, the same figures inside each stratum, and how varied the confidences are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from rlx.evaluation.scores import (
    Floats,
    Murphy,
    ReliabilityBin,
    as_pairs,
    aurc,
    auroc,
    brier,
    brier_skill,
    confidence_entropy,
    expected_calibration_error,
    extreme_share,
    maximum_calibration_error,
    murphy_decomposition,
    reliability_bins,
    stratum_predictor,
)

__all__ = ["Calibration", "StratumCalibration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StratumCalibration:
    """Figures within one stratum; `auroc` is None where all labels are equal."""

    n: int
    accuracy: float
    mean_confidence: float
    brier: float
    ece: float
    auroc: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything said about one set of (correct, confidence) pairs.

    Attributes:
        n: how many pairs.
        unparsable: how many of them had no readable confidence (counted as confidence 0).
        brier_skill: 1 - brier / (base rate's Brier); None when all labels are equal.
        ece: 10 equal-width bins; `ece_15`: 15.
        mce: the largest gap of the 10 bins.
        signed_gap: mean confidence minus accuracy; above 0 is over-confident.
        auroc: None when all labels are equal.
        aurc: area under the risk-coverage curve, ties shared evenly.
        distinct_share: distinct confidence values / n.
        extreme_share: share within .01 of 0 or 1.
        entropy: of the histogram over the 10 bins, in nats; 0 when one bin holds all.
        stratum_brier: Brier score of the predictor that says each stratum's accuracy in these data.
        stratum_auroc: its AUROC. An `auroc` near it knows no more than the kind of problem.
        bins: the 10 bins.
        by_stratum: the same figures within each stratum, by its label.
    """

    n: int
    unparsable: int
    accuracy: float
    mean_confidence: float
    signed_gap: float
    brier: float
    brier_skill: float | None
    murphy: Murphy
    ece: float
    ece_15: float
    mce: float
    auroc: float | None
    aurc: float
    distinct_share: float
    extreme_share: float
    entropy: float
    stratum_brier: float
    stratum_auroc: float | None
    bins: tuple[ReliabilityBin, ...]
    by_stratum: Mapping[str, StratumCalibration]

    @classmethod
    def measure(
        cls, correct: ArrayLike, confidence: ArrayLike, stratum: Sequence[str] | None = None
    ) -> Self:
        """Measures everything at once.

        Args:
            correct: `[n]` of 0 or 1.
            confidence: `[n]` in [0, 1]; nan where it was unparsable.
            stratum: `[n]` labels known before any answer; None puts all in one stratum.

        Raises:
            ValueError: no samples, different lengths, or values out of range.
        """
        y, c = as_pairs(correct, confidence)
        labels = np.full(len(y), "") if stratum is None else np.asarray(stratum, dtype=np.str_)
        known = stratum_predictor(y, labels)
        return cls(
            n=len(y),
            unparsable=int(np.isnan(np.asarray(confidence, dtype=np.float64)).sum()),
            accuracy=float(y.mean()),
            mean_confidence=float(c.mean()),
            signed_gap=float(c.mean() - y.mean()),
            brier=brier(y, c),
            brier_skill=brier_skill(y, c),
            murphy=murphy_decomposition(y, c),
            ece=expected_calibration_error(y, c),
            ece_15=expected_calibration_error(y, c, bins=15),
            mce=maximum_calibration_error(y, c),
            auroc=auroc(y, c),
            aurc=aurc(y, c),
            distinct_share=len(np.unique(c)) / len(c),
            extreme_share=extreme_share(c),
            entropy=confidence_entropy(c),
            stratum_brier=brier(y, known),
            stratum_auroc=auroc(y, known),
            bins=reliability_bins(y, c),
            by_stratum={str(s): _within(y[labels == s], c[labels == s]) for s in np.unique(labels)},
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what is undefined is None, never nan."""
        return {**asdict(self), "bins": [asdict(b) for b in self.bins]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Returns what `to_json` was made from; other keys beside it are left alone."""
        strata = record["by_stratum"].items()
        return cls(
            **{
                **{field.name: record[field.name] for field in fields(cls)},
                "murphy": Murphy(**record["murphy"]),
                "bins": tuple(ReliabilityBin(**b) for b in record["bins"]),
                "by_stratum": {label: StratumCalibration(**figures) for label, figures in strata},
            }
        )


def _within(y: Floats, c: Floats) -> StratumCalibration:
    return StratumCalibration(
        n=len(y),
        accuracy=float(y.mean()),
        mean_confidence=float(c.mean()),
        brier=brier(y, c),
        ece=expected_calibration_error(y, c),
        auroc=auroc(y, c),
    )
