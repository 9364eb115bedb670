"""Compare stated confidence with sampled accuracy.

`verbal_conf` is the confidence that the model states. `mc_p_correct` is the share of correct
answers sampled after its whole reasoning. Each answer belongs to a different problem, so answers
are treated as independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlx.probe.statistics import VerbalRow

__all__ = ["Agreement", "VerbalBin", "compute_agreement", "compute_verbal_bins"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of `verbal_conf` and `mc_p_correct`.

    Attributes:
        n: number of answers.
        gap: mean of |verbal_conf - mc_p_correct|.
        rank: Spearman's rank correlation; None if either is constant.
    """

    n: int
    gap: float
    rank: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbalBin:
    """A bin of answers with similar stated confidence.

    Attributes:
        low, high: edges of the bin.
        n: number of answers.
        verbal_conf, mc_p_correct: means over the answers.
        interval: 95 % interval of the mean `mc_p_correct`, by Student's t, clipped to [0, 1]; None
            for a single answer.
    """

    low: float
    high: float
    n: int
    verbal_conf: float
    mc_p_correct: float
    interval: tuple[float, float] | None


Floats = NDArray[np.float64]


def compute_agreement(rows: Sequence[VerbalRow]) -> Agreement | None:
    """Measures how well stated confidences agree with sampled ones; None without answers."""
    if not rows:
        return None
    from scipy.stats import spearmanr

    stated, sampled = _split_confidence_columns(rows)
    varied = len(set(stated)) > 1 and len(set(sampled)) > 1
    rank = float(spearmanr(stated, sampled).statistic) if varied else None
    return Agreement(len(rows), float(np.abs(stated - sampled).mean()), rank)


def compute_verbal_bins(rows: Sequence[VerbalRow], bins: int = 10) -> list[VerbalBin]:
    """Non-empty bins of equal width over `verbal_conf`; a confidence of 1 is in the last bin."""
    if not rows:
        return []
    stated, sampled = _split_confidence_columns(rows)
    places = np.minimum((stated * bins).astype(int), bins - 1)
    return [
        VerbalBin(
            low=place / bins,
            high=(place + 1) / bins,
            n=int((places == place).sum()),
            verbal_conf=float(stated[places == place].mean()),
            mc_p_correct=float(sampled[places == place].mean()),
            interval=_compute_mean_interval(sampled[places == place]),
        )
        for place in sorted(set(places.tolist()))
    ]


def _split_confidence_columns(rows: Sequence[VerbalRow]) -> tuple[Floats, Floats]:
    pairs = np.array([(row.verbal_conf, row.mc_p_correct) for row in rows], dtype=np.float64)
    return pairs[:, 0], pairs[:, 1]


def _compute_mean_interval(values: Floats) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    from scipy.stats import t

    mean = float(values.mean())
    half = float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return max(0.0, mean - half), min(1.0, mean + half)
