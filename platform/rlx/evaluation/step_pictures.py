"""Plot accuracy and calibration error of held-out sets over training steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.evaluation.intervals import Index, compute_bootstrap_intervals
from rlx.evaluation.scores import compute_expected_calibration_error
from rlx.evaluation.style import FAINT, INK, SERIES, build_figure, save_figure, style_axes

__all__ = ["EvaluationPoint", "draw_accuracy_and_ece"]

DRAWS = 200
"""Bootstrap resamples for evaluations without recorded intervals: enough for a plot."""
APART = 0.012
"""Horizontal offset between the bars of two sets at one step, as a share of all steps."""
PANELS = (("accuracy", "accuracy"), ("ece", "ECE, 10 bins"))

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """Evaluation of a held-out set at one step.

    Attributes:
        step: number of completed steps.
        values: `accuracy`, and `ece` if confidences were stated.
        intervals: 95 % intervals of both over problems, if available.
    """

    step: int
    values: Mapping[str, float | None]
    intervals: Mapping[str, Interval | None]

    @classmethod
    def from_evaluation(
        cls, step: int, metrics: Mapping[str, Any], payload: Mapping[str, Any] | None
    ) -> "EvaluationPoint":
        """Reads a recorded evaluation.

        Intervals come from `metrics`, or else from the pairs in `payload`: `problem_ids`, `correct`
        and `confidence`, where an unreadable confidence is null and counts as 0.
        """
        values = {name: metrics.get(name) for name, _ in PANELS}
        intervals = metrics.get("intervals")
        if intervals is None:
            intervals = _compute_moment_intervals(payload or {})
        return cls(step, values, intervals)


def draw_accuracy_and_ece(
    sets: Mapping[str, Sequence[EvaluationPoint]], path: Path
) -> tuple[Path, Path]:
    """Draws one line per set: accuracy, and next to it ECE if confidences are stated.

    Args:
        sets: points of each set, by name, in order of steps.
        path: output path; its suffix is replaced by `.png` and `.svg`.

    Returns:
        The two files.

    Raises:
        ValueError: there is nothing to draw.
    """
    there = [moment for moments in sets.values() for moment in moments]
    panels = [p for p in PANELS if any(moment.values.get(p[0]) is not None for moment in there)]
    if not panels:
        raise ValueError("no evaluations to draw")
    drawn = build_figure(4.6 * len(panels) + 0.4, 3.6, w_pad=0.1, h_pad=0.1)
    axes = drawn.subplots(1, len(panels), squeeze=False)[0]
    for one, (name, title) in zip(axes, panels, strict=True):
        style_axes(one)
        for number, (label, moments) in enumerate(sets.items()):
            aside = APART * (number - (len(sets) - 1) / 2) * max(moment.step for moment in there)
            _draw_metric_line(one, name, label, moments, SERIES[number % len(SERIES)], aside)
        one.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
        one.set_xlabel("step", color=INK)
        one.set_ylim(-0.02, 1.02 if name == "accuracy" else None)
    axes[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    bars = any(any(moment.intervals.values()) for moment in there)
    if bars:
        caption = "bars: 95 % intervals over problems"
        axes[-1].set_title(caption, loc="right", fontsize=8, color=FAINT)
    return save_figure(drawn, path)


def _draw_metric_line(
    axes: Any, name: str, label: str, moments: Sequence[EvaluationPoint], colour: str, aside: float
) -> None:
    own = [
        (moment.step + aside, moment.values[name], moment.intervals.get(name)) for moment in moments
    ]
    known = [(step, value, bar) for step, value, bar in own if value is not None]
    axes.plot(
        [step for step, *_ in known],
        [value for _, value, _ in known],
        "o-",
        color=colour,
        markersize=3.5,
        linewidth=1.5,
        label=label,
    )
    for step, _, bar in known:
        if bar is not None:
            axes.vlines(step, *bar, color=colour, alpha=0.45, linewidth=2.5)


def _compute_moment_intervals(payload: Mapping[str, Any]) -> dict[str, Interval | None]:
    if not payload.get("problem_ids") or not payload.get("correct"):
        return {}
    correct = np.array(payload["correct"], dtype=np.float64)
    measures: dict[str, Any] = {"accuracy": lambda at: float(correct[at].mean())}
    if payload.get("confidence") is not None:
        stated = np.array([c or 0.0 for c in payload["confidence"]])

        def compute_ece(at: Index) -> float:
            return compute_expected_calibration_error(correct[at], stated[at])

        measures["ece"] = compute_ece
    return compute_bootstrap_intervals(payload["problem_ids"], measures, seed=0, draws=DRAWS)
