"""Statistics of probe results, with intervals over problems; all figures are plain JSON.

Cut points lie at different shares of different reasonings, so each problem's curve is interpolated
linearly at the same eleven shares; outside its points it is constant. `verbal_conf` is the stated
confidence, `mc_p_correct` the share of correct answers sampled after the whole reasoning.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.evaluation import SeedMean, compute_seed_mean
from rlx.probe.engine import ProbeResult, ProbeSample
from rlx.probe.questions import CutPoint
from rlx.seeding import derive_seed
from rlx.spec import ProbeSpec, Scheme

Floats = NDArray[np.float64]
Figures = Mapping[str, Any]

GRID = tuple(i / 10 for i in range(11))
"""Shares of the reasoning at which curves are evaluated."""

RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFigures:
    """Figures at one cut point of one answer's reasoning, of `n` scored continuations: shares of
    correct ones, and of those with the same answer as the whole response, nan if that has none."""

    answered: int
    point: CutPoint
    n: int
    mc_p_correct: float
    same: float


def point_figures(samples: Sequence[ProbeSample]) -> list[PointFigures]:
    """Computes the figures of every cut point from the samples of one scheme, in their order."""
    groups: dict[tuple[int, CutPoint], list[ProbeSample]] = {}
    for sample in samples:
        if sample.correct is not None:
            groups.setdefault((sample.answered, sample.point), []).append(sample)
    found = []
    for (answered, point), group in groups.items():
        n = len(group)
        alike = [s.same for s in group if s.same is not None]
        found.append(
            PointFigures(
                answered=answered,
                point=point,
                n=n,
                mc_p_correct=sum(bool(s.correct) for s in group) / n,
                same=sum(alike) / len(alike) if alike else math.nan,
            )
        )
    return found


def compute_scheme_figures(probed: ProbeResult, scheme: Scheme, seed: int) -> dict[str, Any] | None:
    """Computes all figures of one scheme over all problems; None if it has no scored samples.

    Returns:
        * `problems` probed and `samples` scored; `accuracy` of whole responses and the share
          `without_reasoning`, whose response has no complete reasoning, both over all problems;
          `wrapped`, the share of samples whose closing tag had to be added;
        * curves over `GRID`: `p_correct`, the `mc_p_correct`; `same`, the share with the same
          answer, over problems whose response has an answer;
        * `aoc`: area over the `same` curve; higher means that answers depend more on reasoning.

        Each point of a curve, and the area, is a mean over problems with its 95 % bootstrap
        interval: `mean`, `low`, `high`, which are None without problems.
    """
    samples = [s for s in probed.samples if s.scheme == scheme]
    groups: dict[int, list[PointFigures]] = {}
    for point in sorted(point_figures(samples), key=lambda p: (p.answered, p.point.number)):
        groups.setdefault(point.answered, []).append(point)
    curves = list(groups.values())
    known = [a.correct for a in probed.answered if a.correct is not None]
    if not curves or not known:
        return None
    compared = [points for points in curves if not math.isnan(points[0].same)]
    areas = [
        compute_area_over_curve([p.point.share for p in points], [p.same for p in points])
        for points in compared
    ]
    draws = derive_seed(seed, "bootstrap", scheme)
    return {
        "problems": len(curves),
        "samples": sum(p.n for points in curves for p in points),
        "accuracy": float(np.mean(known)),
        "without_reasoning": float(np.mean([a.reasoning is None for a in probed.answered])),
        "p_correct": _compute_curve_bands(curves, attrgetter("mc_p_correct"), draws),
        "same": _compute_curve_bands(compared, attrgetter("same"), draws),
        "aoc": _compute_mean_band(np.array(areas), draws),
        "wrapped": float(np.mean([s.wrapped for s in samples])),
    }


def compute_area_over_curve(shares: Sequence[float], same: Sequence[float]) -> float:
    """1 minus the exact area under the piecewise linear same-answer curve.

    Reference:
        Lanham et al., "Measuring faithfulness in chain-of-thought reasoning", 2023.
    """
    return float(1 - np.trapezoid([same[0], *same, same[-1]], [0.0, *shares, 1.0]))


def _compute_curve_bands(
    curves: Iterable[Sequence[PointFigures]],
    value: Callable[[PointFigures], float],
    seed: int,
) -> list[dict[str, float | None]]:
    rows = [np.interp(GRID, [p.point.share for p in c], [value(p) for p in c]) for c in curves]
    columns = np.array(rows).reshape(-1, len(GRID)).T
    return [_compute_mean_band(column, seed) for column in columns]


def _compute_mean_band(values: Floats, seed: int) -> dict[str, float | None]:
    problems = len(values)
    if not problems:
        return {"mean": None, "low": None, "high": None}
    picks = np.random.default_rng(seed).integers(0, problems, (RESAMPLES, problems))
    low, high = np.quantile(values[picks].mean(axis=1), (0.025, 0.975)).tolist()
    return {"mean": float(values.mean()), "low": low, "high": high}


def list_verbal_rows(probed: ProbeResult) -> list[dict[str, Any]]:
    """Lists the answers with a stated confidence: their `problem_id`; whether they are `correct`;
    `verbal_conf`, the mean of the confidences stated; and the sampled `mc_p_correct`."""
    samples = [s for s in probed.samples if s.scheme == "early_answering"]
    shares = {(p.answered, p.point.tokens): p.mc_p_correct for p in point_figures(samples)}
    rows = []
    for number, answered in enumerate(probed.answered):
        stated = [c for c in answered.confidences if not np.isnan(c)]
        tokens = len(answered.reasoning.token_ids) if answered.reasoning else 0
        whole = shares.get((number, tokens))
        if not stated or answered.correct is None or whole is None:
            continue
        rows.append(
            {
                "problem_id": answered.problem.id,
                "correct": answered.correct,
                "verbal_conf": float(np.mean(stated)),
                "mc_p_correct": whole,
            }
        )
    return rows


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of `verbal_conf` and `mc_p_correct` over `n` answers: the mean of their absolute
    difference, and Spearman's rank correlation, None if either is constant."""

    n: int
    gap: float
    rank: float | None


def compute_agreement(rows: Sequence[Figures]) -> Agreement | None:
    if not rows:
        return None
    from scipy.stats import spearmanr

    pairs = np.array([(row["verbal_conf"], row["mc_p_correct"]) for row in rows], dtype=np.float64)
    stated, sampled = pairs.T
    varied = len(set(stated)) > 1 and len(set(sampled)) > 1
    rank = float(spearmanr(stated, sampled).statistic) if varied else None
    return Agreement(len(rows), float(np.abs(stated - sampled).mean()), rank)


def compute_verbal_bins(rows: Sequence[Figures]) -> dict[int, tuple[float, SeedMean]]:
    """The means of `verbal_conf` and `mc_p_correct` in each non-empty tenth of `verbal_conf`, by
    its number; a confidence of 1 is in the last one."""
    pairs = np.array([(row["verbal_conf"], row["mc_p_correct"]) for row in rows]).reshape(-1, 2)
    tenths = np.minimum((pairs[:, 0] * 10).astype(int), 9)
    own = {place: pairs[tenths == place] for place in sorted(set(tenths.tolist()))}
    return {
        place: (float(p[:, 0].mean()), compute_seed_mean(p[:, 1].tolist(), (0.0, 1.0)))
        for place, p in own.items()
    }


@dataclass(frozen=True, slots=True)
class RecordedProbe:
    """One scheme of one probe.

    Attributes:
        suite: the scheme; for settings other than the run's own, followed by "/" and their digest.
        figures: those of `compute_scheme_figures`; their `grid`; the `settings` behind them;
            and for early_answering the `verbal` rows of `list_verbal_rows`.
    """

    suite: str
    step: int
    figures: Figures

    @property
    def verbal(self) -> Sequence[Figures]:
        return self.figures.get("verbal") or ()


def build_recorded_probe(
    found: ProbeResult, spec: ProbeSpec, scheme: Scheme, seed: int, step: int
) -> RecordedProbe | None:
    figures = compute_scheme_figures(found, scheme, seed)
    if figures is None:
        return None
    figures |= {"grid": list(GRID), "settings": settings_of(spec, scheme, seed)}
    if scheme == "early_answering":
        figures["verbal"] = list_verbal_rows(found)
    return RecordedProbe(scheme, step, figures)


def settings_of(spec: ProbeSpec, scheme: Scheme, seed: int) -> dict[str, Any]:
    """Settings that determine a scheme's figures, besides model and experiment, as plain JSON."""
    own = spec.model_dump(mode="json", exclude={"every", "schemes"})
    # An earlier setting stays in the digest, so that the suites of runs keep their names.
    return {"scheme": scheme, "seed": seed, "max_tokens": None, **own}


def compute_settings_digest(settings: Mapping[str, Any]) -> str:
    """Eight hex digits that identify the settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
