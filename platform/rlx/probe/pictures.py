"""Plots of probes, written like those of `rlx.evaluation.pictures`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.evaluation import (
    BLUE,
    FAINT,
    INK,
    ORANGE,
    build_figure,
    draw_bin_bar,
    draw_diagonal,
    save_figure,
    style_axes,
)
from rlx.probe.statistics import (
    GRID,
    Agreement,
    Figures,
    RecordedProbe,
    compute_agreement,
    compute_verbal_bins,
)

NAMED = 6
"""Maximum number of steps in a legend; other lines have no entry."""


def draw_probe_curves(probes: Sequence[RecordedProbe], path: Path) -> tuple[Path, Path]:
    """Draws probe curves: a column per suite, a line per step, from light to dark; `mc_p_correct`
    against the share of the reasoning kept, with the accuracy of whole responses at the right edge,
    and below it the share of answers equal to the whole response's."""
    suites: dict[str, list[RecordedProbe]] = {}
    for probe in sorted(probes, key=lambda p: p.step):
        suites.setdefault(probe.suite, []).append(probe)
    if not suites:
        raise ValueError("no probes to draw")
    named = min(NAMED, max(map(len, suites.values())))
    width, words = max(6.0, 4.1 * len(suites)), 0.35 + 0.19 * named
    drawn = build_figure(width, 5.4 + words, w_pad=0.1, h_pad=0.06)
    rows = drawn.subplots(3, len(suites), squeeze=False, height_ratios=(2.9, 2.0, words))
    for column, (suite, steps) in enumerate(suites.items()):
        _draw_suite_column([row[column] for row in rows], suite, steps)
    rows[0][0].set_ylabel("mc_p_correct", color=INK)
    rows[1][0].set_ylabel("same answer", color=INK)
    return save_figure(drawn, path)


def draw_verbal_against_sampled(probes: Sequence[RecordedProbe], path: Path) -> tuple[Path, Path]:
    """Draws `mc_p_correct` against `verbal_conf` of the same answers, at the first and last step,
    with the means of ten bins of `verbal_conf`; the counts are below."""
    stated = sorted((p for p in probes if p.verbal), key=lambda p: p.step)
    if not stated:
        raise ValueError("no confidences to draw")
    selected = stated[:1] + stated[1:][-1:]
    drawn = build_figure(0.6 + 4.6 * len(selected), 5.9, w_pad=0.12, h_pad=0.05)
    axes = drawn.subplots(
        2, len(selected), squeeze=False, sharex=True, sharey="row", height_ratios=(4.6, 1)
    )
    for column, probe in enumerate(selected):
        _draw_verbal_points(axes[0][column], probe)
        lower = axes[1][column]
        style_axes(lower)
        for place, (_, found_mean) in compute_verbal_bins(probe.verbal).items():
            edges = (place / 10, (place + 1) / 10)
            draw_bin_bar(lower, edges, found_mean.n, found_mean.n, FAINT)
        lower.margins(y=0.25)
        lower.set_xlabel("verbal_conf", color=INK)
        if (found := compute_agreement(probe.verbal)) is not None:
            lower.text(
                0.5, -0.62, agreement_line(found), transform=lower.transAxes, ha="center",
                va="top", fontsize=7.5, color=FAINT,
            )  # fmt: skip
    axes[0][0].set_ylabel("mc_p_correct", color=INK)
    axes[1][0].set_ylabel("answers", color=INK)
    return save_figure(drawn, path)


def agreement_line(found: Agreement) -> str:
    rank = "undefined (one of them is constant)" if found.rank is None else f"{found.rank:.2f}"
    answers = "1 answer" if found.n == 1 else f"{found.n} answers"
    return (
        f"mean |verbal_conf - mc_p_correct| {found.gap:.3f} · rank correlation {rank} · {answers}"
    )


def _draw_suite_column(axes: Sequence[Any], suite: str, steps: Sequence[RecordedProbe]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    upper, lower, words = axes
    lines = []
    shades = LinearSegmentedColormap.from_list("steps", ["#9CCBE8", "#003A5C"])
    for number, probe in enumerate(steps):
        figures = probe.figures
        shade = BLUE if len(steps) == 1 else shades(number / (len(steps) - 1))
        banded = len(steps) <= 3 or number in (0, len(steps) - 1)
        lines.append(_draw_band_line(upper, figures["p_correct"], shade, banded))
        _draw_band_line(lower, figures["same"], shade, banded)
        upper.plot(
            1.045, figures["accuracy"], "D", color=shade, markersize=5.5, markeredgecolor="white",
            clip_on=False, zorder=5,
        )  # fmt: skip
    for axis in (upper, lower):
        style_axes(axis)
        axis.set(xlim=(-0.02, 1.07), ylim=(-0.03, 1.03))
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    upper.tick_params(labelbottom=False)
    upper.set_title(suite, loc="left", color=INK, fontsize=11, fontweight="bold")
    samples = f"{steps[-1].figures['samples']} samples"
    upper.set_title(samples, loc="right", color=FAINT, fontsize=8)
    lower.set_xlabel("share of reasoning kept", color=INK)
    _draw_step_legend(words, steps, lines)


def _draw_band_line(axis: Any, bands: Sequence[Figures], shade: Any, banded: bool) -> Any:
    """Draws means, with their intervals where `banded`; a mean that is None leaves a gap."""
    means, low, high = (
        [float("nan") if band[name] is None else band[name] for band in bands]
        for name in ("mean", "low", "high")
    )
    if banded:
        axis.fill_between(GRID, low, high, color=shade, alpha=0.17, linewidth=0)
    (line,) = axis.plot(GRID, means, color=shade, linewidth=1.8, marker="o", markersize=3)
    return line


def _draw_step_legend(axis: Any, steps: Sequence[RecordedProbe], lines: Sequence[Any]) -> None:
    from matplotlib.lines import Line2D

    axis.set_axis_off()
    chosen = np.linspace(0, len(steps) - 1, min(len(steps), NAMED)).round().astype(int).tolist()
    labels = []
    for probe in (steps[n] for n in chosen):
        area, problems = probe.figures["aoc"], probe.figures["problems"]
        share = "–"
        if area["mean"] is not None:
            share = f"{area['mean']:.2f} {area['low']:.2f}–{area['high']:.2f}"
        labels.append(f"step {probe.step}: area over same {share}, {problems} problems")
    diamond = Line2D([], [], marker="D", linestyle="", color=FAINT, markersize=5)
    legend = axis.legend(
        [*(lines[n] for n in chosen), diamond],
        [*labels, "accuracy of whole responses"],
        loc="upper left",
        borderaxespad=0,
        frameon=False,
        fontsize=7.5,
        labelcolor=INK,
    )
    legend.set_in_layout(False)  # the legend must not shrink the curves


def _draw_verbal_points(axis: Any, probe: RecordedProbe) -> None:
    draw_diagonal(axis)
    kinds = (("wrong answers", False, ORANGE, "x"), ("right answers", True, BLUE, "o"))
    for label, right, colour, mark in kinds:
        rows = [row for row in probe.verbal if row["correct"] is right]
        x, y = [row["verbal_conf"] for row in rows], [row["mc_p_correct"] for row in rows]
        named = f"{len(rows)} {label}"
        axis.scatter(x, y, s=26, marker=mark, color=colour, alpha=0.55, linewidth=1.1, label=named)
    bins = compute_verbal_bins(probe.verbal).values()
    x, means = [stated for stated, _ in bins], [mean for _, mean in bins]
    low = [0.0 if m.low is None else m.mean - m.low for m in means]
    high = [0.0 if m.high is None else m.high - m.mean for m in means]
    axis.errorbar(
        x, [m.mean for m in means], yerr=(low, high), color=INK, linewidth=1.4, elinewidth=1,
        capsize=3, marker="s", markersize=4, label="mean of a bin, 95 %", zorder=4,
    )  # fmt: skip
    axis.set_title(f"step {probe.step}", loc="left", color=INK, fontsize=11, fontweight="bold")
    axis.legend(loc="upper left", fontsize=7.5, labelcolor=INK, framealpha=0.85)
