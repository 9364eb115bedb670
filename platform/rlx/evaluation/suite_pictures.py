"""Plots of an evaluation suite, with one panel per set."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.evaluation.answer_scaling import AnswerScaling
from rlx.evaluation.answers import ScoredAnswer
from rlx.evaluation.calibration import Calibration
from rlx.evaluation.pictures import draw_counts, draw_reliability
from rlx.evaluation.selective import compute_risk_coverage
from rlx.evaluation.style import (
    BLUE,
    FAINT,
    INK,
    ORANGE,
    SERIES,
    build_figure,
    save_figure,
    style_axes,
)

__all__ = ["draw_suite"]

WIDTH = 3.7
"""Width of a panel in inches."""


def draw_suite(
    answers: Mapping[str, Sequence[ScoredAnswer]],
    figures: Mapping[str, Mapping[str, Any]],
    outside: frozenset[str],
    folder: Path,
) -> list[Path]:
    """Draws every plot that the suite has data for.

    Args:
        answers: answers of each set, by name.
        figures: metrics of each set from `compute_answer_metrics`, by name.
        outside: out-of-distribution sets, drawn in another colour.
        folder: output folder of `reliability`, `confidence`, `risk_coverage` and `scaling`, each as
            `.png` and `.svg`.

    Returns:
        The files.
    """
    colours = {name: ORANGE if name in outside else BLUE for name in answers}
    stated = [name for name, found in figures.items() if found["brier"] is not None]
    scaled = [name for name, found in figures.items() if found["scaling"] is not None]
    made: list[Path] = []
    if stated:
        made += _draw_suite_reliability(
            {n: figures[n] for n in stated}, colours, folder / "reliability"
        )
        made += _draw_confidence_histograms({n: answers[n] for n in stated}, folder / "confidence")
        made += _draw_risk_coverage({n: answers[n] for n in stated}, folder / "risk_coverage")
    if scaled:
        found = {n: AnswerScaling.from_json(figures[n]["scaling"]) for n in scaled}
        made += _draw_answer_scaling(found, folder / "scaling")
    return made


def _draw_suite_reliability(
    figures: Mapping[str, Mapping[str, Any]], colours: Mapping[str, str], path: Path
) -> tuple[Path, Path]:
    """Draws accuracy against stated confidence with Wilson bars, and counts, a column per set."""
    drawn = build_figure(4.8 * len(figures), 6.2, w_pad=0.12, h_pad=0.05, hspace=0.02, wspace=0.04)
    axes = drawn.subplots(
        2, len(figures), sharex=True, sharey="row", height_ratios=(4.4, 1), squeeze=False
    )
    for column, (name, found) in enumerate(figures.items()):
        calibration = Calibration.from_json(found)
        draw_reliability(axes[0][column], calibration, colours[name], name)
        draw_counts(axes[1][column], calibration, colours[name])
    axes[0][0].set_ylabel("accuracy", color=INK)
    axes[1][0].set_ylabel("share", color=INK)
    return save_figure(drawn, path)


def _draw_confidence_histograms(
    answers: Mapping[str, Sequence[ScoredAnswer]], path: Path
) -> tuple[Path, Path]:
    """Draws confidence histograms, correct answers above the axis and wrong ones below."""
    drawn, panels = _build_panel_row(len(answers))
    edges = np.arange(11) / 10
    for axes, (name, own) in zip(panels, answers.items(), strict=True):
        style_axes(axes)
        pairs = np.array([[np.nan_to_num(a.confidences[0]), a.correct] for a in own])
        for label, colour, sign in ((1, BLUE, 1), (0, ORANGE, -1)):
            counts, _ = np.histogram(pairs[pairs[:, 1] == label, 0], bins=edges)
            axes.bar(edges[:-1] + 0.05, sign * counts / len(own), width=0.09, color=colour)
        axes.axhline(0, color=FAINT, linewidth=0.8)
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.2g}")
        axes.set_title(name, loc="left", fontsize=10, color=INK, fontweight="bold")
        axes.set_xlabel("stated confidence", color=INK)
    panels[0].set_ylabel("share: wrong below, right above", color=INK)
    return save_figure(drawn, path)


def _draw_risk_coverage(
    answers: Mapping[str, Sequence[ScoredAnswer]], path: Path
) -> tuple[Path, Path]:
    """Draws the risk-coverage curve, with the best possible order and a random one."""
    drawn, panels = _build_panel_row(len(answers))
    for axes, (name, own) in zip(panels, answers.items(), strict=True):
        style_axes(axes)
        correct = np.array([a.correct for a in own], dtype=np.float64)
        confidence = np.array([a.confidences[0] for a in own])
        coverage = np.arange(1, len(own) + 1) / len(own)
        axes.plot(
            coverage, compute_risk_coverage(correct, confidence), color=BLUE, label="by confidence"
        )
        best = compute_risk_coverage(correct, correct)
        axes.plot(coverage, best, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), label="best")
        axes.axhline(1 - correct.mean(), color=ORANGE, linewidth=1, label="random order")
        axes.set(xlim=(0, 1.02), ylim=(-0.02, 1.02))
        axes.set_title(name, loc="left", fontsize=10, color=INK, fontweight="bold")
        axes.set_xlabel("coverage", color=INK)
    panels[0].set_ylabel("risk: share of wrong answers", color=INK)
    panels[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    return save_figure(drawn, path)


def _draw_answer_scaling(found: Mapping[str, AnswerScaling], path: Path) -> tuple[Path, Path]:
    """Draws accuracy against the number of answers, one line per selection rule."""
    drawn, panels = _build_panel_row(len(found))
    rules = (
        ("pass_at", "oracle"),
        ("most_confident", "most confident"),
        ("weighted", "vote by confidence"),
        ("majority", "vote"),
    )
    for axes, (name, scaling) in zip(panels, found.items(), strict=True):
        style_axes(axes)
        for (rule, label), colour in zip(rules, SERIES, strict=False):
            if (values := getattr(scaling, rule)) is not None:
                axes.plot(scaling.k, values, "o-", color=colour, markersize=3.5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(scaling.k, [str(k) for k in scaling.k])
        axes.set_ylim(-0.02, 1.02)
        axes.set_title(name, loc="left", fontsize=10, color=INK, fontweight="bold")
        axes.set_xlabel("answers per problem", color=INK)
    panels[0].set_ylabel("accuracy of the selected answer", color=INK)
    panels[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    return save_figure(drawn, path)


def _build_panel_row(count: int) -> tuple[Any, list[Any]]:
    drawn = build_figure(WIDTH * count + 0.4, 3.4, w_pad=0.1, h_pad=0.1)
    return drawn, list(drawn.subplots(1, count, sharey=True, squeeze=False)[0])
