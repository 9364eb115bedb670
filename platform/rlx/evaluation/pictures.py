"""Plots of calibration, held-out sets, suites and training, each as `.png` and `.svg`, without
pyplot's global state. Colours are from the Okabe-Ito palette, which is safe for colour-blind
readers."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.evaluation.answers import ScoredAnswer
from rlx.evaluation.calibration import compute_risk_coverage

BLUE, ORANGE = "#0072B2", "#D55E00"
SERIES = ("#009E73", BLUE, ORANGE, "#CC79A7", "#56B4E9", "#E69F00")
"""Line colours of one panel, in order."""
INK, FAINT, GRID = "#262626", "#767676", "#E4E4E4"


def build_figure(width: float, height: float, **padding: Any) -> Any:
    """An empty white figure of so many inches, with options of Matplotlib's constrained layout."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(**padding)
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def style_axes(axes: Any) -> None:
    axes.set_facecolor("white")
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK, length=3)


def _set_panel_title(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")


def save_figure(drawn: Any, path: Path) -> tuple[Path, Path]:
    """Writes a figure as `.png` and `.svg`."""
    from matplotlib import rc_context

    stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg"))
    drawn.savefig(png, dpi=160)
    drawn.set_layout_engine("none")  # the first save has computed the layout
    # No date and no random ids, so that equal figures give equal files.
    with rc_context({"svg.hashsalt": stem.name}):
        drawn.savefig(svg, metadata={"Date": None})
    return png, svg


Curve = Sequence[tuple[int, float]]
Figures = Mapping[str, Any]
"""Figures of answers as plain JSON, as they are recorded."""


def draw_reliability_diagram(before: Figures, after: Figures, path: Path) -> tuple[Path, Path]:
    """Draws accuracy against stated confidence, before and after training, side by side. Each point
    is a bin at its mean confidence, with the 95 % Wilson interval of its accuracy."""
    columns = {"Before training": (before, ORANGE), "After training": (after, BLUE)}
    return _draw_reliability_columns(columns, path)


def _draw_reliability_columns(
    columns: Mapping[str, tuple[Figures, str]], path: Path
) -> tuple[Path, Path]:
    drawn = build_figure(4.8 * len(columns), 6.2, w_pad=0.12, h_pad=0.05, hspace=0.02, wspace=0.04)
    axes = drawn.subplots(
        2, len(columns), sharex=True, sharey="row", height_ratios=(4.4, 1), squeeze=False
    )
    for column, (title, (calibration, colour)) in enumerate(columns.items()):
        _draw_reliability(axes[0][column], calibration, colour, title)
        lower = axes[1][column]
        style_axes(lower)
        for b in calibration["bins"]:
            draw_bin_bar(lower, (b["low"], b["high"]), b["n"] / calibration["n"], b["n"], colour)
        lower.margins(y=0.22)
        lower.set_xlabel("stated confidence", color=INK)
    axes[0][0].set_ylabel("accuracy", color=INK)
    axes[1][0].set_ylabel("share", color=INK)
    return save_figure(drawn, path)


def draw_learning_curves(metrics: Mapping[str, Curve], path: Path) -> tuple[Path, Path]:
    """Draws one small panel per metric; values that are not finite leave a gap."""
    if not metrics:
        raise ValueError("no metrics to draw")
    columns = min(3, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    drawn = build_figure(3.5 * columns + 0.3, 2.2 * rows + 0.35, w_pad=0.1, h_pad=0.1)
    panels = list(drawn.subplots(rows, columns, sharex=True, squeeze=False).flat)
    for panel, (name, curve) in zip(panels, metrics.items(), strict=False):
        _draw_training_curve(panel, name, curve)
    for index, panel in enumerate(panels):
        if index >= len(metrics):
            panel.set_visible(False)
        elif index + columns >= len(metrics):
            panel.tick_params(labelbottom=True)
    drawn.supxlabel("step", color=INK, fontsize=10)
    return save_figure(drawn, path)


def draw_diagonal(axes: Any) -> None:
    style_axes(axes)
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))


def draw_bin_bar(axes: Any, edges: tuple[float, float], height: float, n: int, colour: str) -> None:
    low, high = edges
    at = ((low + high) / 2, height)
    axes.bar(*at, width=0.9 * (high - low), color=colour, alpha=0.8)
    if n:
        place = {"textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{n}", at, (0, 2), **place, fontsize=7, color=INK)


def _draw_reliability(axes: Any, calibration: Figures, colour: str, title: str) -> None:
    held = [b for b in calibration["bins"] if b["n"]]
    x, y = [b["confidence"] for b in held], [b["accuracy"] for b in held]
    low = [b["accuracy"] - b["accuracy_low"] for b in held]
    high = [b["accuracy_high"] - b["accuracy"] for b in held]
    draw_diagonal(axes)
    axes.vlines(x, x, y, color=colour, alpha=0.25, linewidth=5, zorder=2)
    axes.errorbar(x, y, yerr=(low, high), fmt="none", ecolor=colour, elinewidth=1.2, capsize=3)
    area = [18 + 170 * b["n"] / calibration["n"] for b in held]
    axes.scatter(x, y, s=area, color=colour, edgecolor="white", linewidth=0.8, zorder=4)
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=40)
    auroc, known = (
        "-" if calibration[name] is None else f"{calibration[name]:.2f}"
        for name in ("auroc", "stratum_auroc")
    )
    caption = (
        f"accuracy {calibration['accuracy']:.2f} · stated {calibration['mean_confidence']:.2f} · "
        f"Brier {calibration['brier']:.3f} · ECE {calibration['ece']:.3f} · AUROC {auroc}\n"
        f"stratum alone: Brier {calibration['stratum_brier']:.3f}, AUROC {known} · {len(held)} of "
        f"{len(calibration['bins'])} bins used"
    )
    note = axes.text(0, 1.025, caption, transform=axes.transAxes, color=INK, linespacing=1.5)
    note.set(fontsize=8.5, in_layout=False)
    counts = f"{calibration['n']} answers, {calibration['unparsable']} unreadable"
    axes.set_title(counts, loc="right", color=FAINT, fontsize=8.5, pad=40)


def _draw_training_curve(axes: Any, name: str, curve: Curve) -> None:
    style_axes(axes)
    steps = [step for step, _ in curve]
    values = [value if math.isfinite(value) else math.nan for _, value in curve]
    half = len(values) // 20 if len(values) >= 40 else 0  # noisy: also means over a tenth
    axes.plot(steps, values, "o-" if len(values) <= 12 else "-", color=BLUE, markersize=3.5)
    if half:
        axes.lines[0].set(linewidth=0.8, alpha=0.3)
        width = 2 * half + 1
        means = np.convolve(values, np.full(width, 1 / width), "valid")
        axes.plot(steps[half:-half], means, color=BLUE, linewidth=1.7)
    _set_panel_title(axes, name)
    axes.tick_params(labelsize=8)


WIDTH = 3.7
"""Width of a panel in inches."""


def draw_suite(
    answers: Mapping[str, Sequence[ScoredAnswer]],
    figures: Mapping[str, Figures],
    outside: frozenset[str],
    folder: Path,
) -> list[Path]:
    """Draws every plot that the suite has data for: `reliability`, `confidence`, `risk_coverage`
    and `scaling`. Sets `outside` the training distribution have another colour."""
    colours = {name: ORANGE if name in outside else BLUE for name in answers}
    stated = [name for name, found in figures.items() if found["brier"] is not None]
    scaled = [name for name, found in figures.items() if found["scaling"] is not None]
    made: list[Path] = []
    if stated:
        columns = {n: (figures[n], colours[n]) for n in stated}
        made += _draw_reliability_columns(columns, folder / "reliability")
        made += _draw_confidence_histograms({n: answers[n] for n in stated}, folder / "confidence")
        made += _draw_risk_coverage({n: answers[n] for n in stated}, folder / "risk_coverage")
    if scaled:
        made += _draw_answer_scaling({n: figures[n]["scaling"] for n in scaled}, folder / "scaling")
    return made


def _draw_confidence_histograms(
    answers: Mapping[str, Sequence[ScoredAnswer]], path: Path
) -> tuple[Path, Path]:
    """Correct answers above the axis, wrong ones below."""
    drawn, panels = _build_panel_row(answers, "stated confidence")
    edges = np.arange(11) / 10
    for axes, own in zip(panels, answers.values(), strict=True):
        pairs = np.array([[a.confidences[0], a.correct] for a in own])
        for label, colour, sign in ((1, BLUE, 1), (0, ORANGE, -1)):
            counts, _ = np.histogram(pairs[pairs[:, 1] == label, 0], bins=edges)
            axes.bar(edges[:-1] + 0.05, sign * counts / len(own), width=0.09, color=colour)
        axes.axhline(0, color=FAINT, linewidth=0.8)
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.2g}")
    panels[0].set_ylabel("share: wrong below, right above", color=INK)
    return save_figure(drawn, path)


def _draw_risk_coverage(
    answers: Mapping[str, Sequence[ScoredAnswer]], path: Path
) -> tuple[Path, Path]:
    drawn, panels = _build_panel_row(answers, "coverage")
    for axes, own in zip(panels, answers.values(), strict=True):
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
    panels[0].set_ylabel("risk: share of wrong answers", color=INK)
    panels[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    return save_figure(drawn, path)


def _draw_answer_scaling(found: Mapping[str, Figures], path: Path) -> tuple[Path, Path]:
    drawn, panels = _build_panel_row(found, "answers per problem")
    rules = (
        ("pass_at", "oracle"),
        ("most_confident", "most confident"),
        ("weighted", "vote by confidence"),
        ("majority", "vote"),
    )
    for axes, scaling in zip(panels, found.values(), strict=True):
        for (rule, label), colour in zip(rules, SERIES, strict=False):
            if (values := scaling[rule]) is not None:
                axes.plot(scaling["k"], values, "o-", color=colour, markersize=3.5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(scaling["k"], [str(k) for k in scaling["k"]])
        axes.set_ylim(-0.02, 1.02)
    panels[0].set_ylabel("accuracy of the selected answer", color=INK)
    panels[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    return save_figure(drawn, path)


def _build_panel_row(titles: Collection[str], label: str) -> tuple[Any, list[Any]]:
    """A figure with one panel per title, and the same label below each."""
    drawn = build_figure(WIDTH * len(titles) + 0.4, 3.4, w_pad=0.1, h_pad=0.1)
    panels = list(drawn.subplots(1, len(titles), sharey=True, squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        style_axes(axes)
        _set_panel_title(axes, title)
        axes.set_xlabel(label, color=INK)
    return drawn, panels
