"""Plots of calibration and of training metrics, for files and for the terminal."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.evaluation.calibration import Calibration
from rlx.evaluation.style import BLUE, FAINT, INK, ORANGE, build_figure, save_figure, style_axes

if TYPE_CHECKING:
    from rich.text import Text

__all__ = [
    "draw_counts",
    "draw_learning_curves",
    "draw_reliability",
    "draw_reliability_diagram",
    "render_reliability_text",
]

Curve = Sequence[tuple[int, float]]


def draw_reliability_diagram(
    before: Calibration, after: Calibration, path: Path
) -> tuple[Path, Path]:
    """Draws accuracy against stated confidence, before and after training, side by side.

    Each point is a bin at its mean confidence, with the 95 % Wilson interval of its accuracy. Its
    area grows with the bin's count; the histogram below shows the exact count.

    Args:
        before: calibration before training.
        after: calibration after training.
        path: output path; its suffix is replaced by `.png` and `.svg`.

    Returns:
        The two files.
    """
    drawn = build_figure(9.6, 6.2, w_pad=0.12, h_pad=0.05, hspace=0.02, wspace=0.04)
    axes = drawn.subplots(2, 2, sharex=True, sharey="row", height_ratios=(4.4, 1))
    columns = (("Before training", before, ORANGE), ("After training", after, BLUE))
    for column, (title, calibration, colour) in enumerate(columns):
        draw_reliability(axes[0][column], calibration, colour, title)
        draw_counts(axes[1][column], calibration, colour)
    axes[0][0].set_ylabel("accuracy", color=INK)
    axes[1][0].set_ylabel("share", color=INK)
    return save_figure(drawn, path)


def draw_learning_curves(metrics: Mapping[str, Curve], path: Path) -> tuple[Path, Path]:
    """Draws one small panel per metric, in the order given.

    Args:
        metrics: `(step, value)` pairs by name; values that are not finite leave a gap.
        path: output path; its suffix is replaced by `.png` and `.svg`.

    Returns:
        The two files.

    Raises:
        ValueError: there is nothing to draw.
    """
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


def render_reliability_text(calibration: Calibration, *, width: int = 80) -> "Text":
    """Draws a reliability diagram as text, one line per non-empty bin.

    The bar is the accuracy. The mark is the mean confidence, where the bar would end under perfect
    calibration.

    Args:
        calibration: calibration metrics.
        width: columns to use, at least 66.

    Returns:
        A rich `Text`; its `plain` is the same without colour.
    """
    from rich.text import Text

    cells = max(width, 66) - 38
    text = Text(no_wrap=True)
    text.append(f"{'confidence':<12}{'accuracy █ against stated ┃':<{cells}}", "bold")
    text.append(f"{'stated':>8}{'right':>7}{'n':>7}\n", "bold")
    for b in calibration.bins:
        if b.confidence is None or b.accuracy is None:
            continue
        text.append(f"{b.low:.1f} to {b.high:.1f}  ", "dim")
        text.append_text(_render_accuracy_bar(b.accuracy, b.confidence, cells))
        text.append(f"{b.confidence:>8.2f}{b.accuracy:>7.2f}{b.n:>7}\n")
    text.append(
        f"{_format_headline(calibration)}\n{_format_stratum_reference(calibration)}\n", "dim"
    )
    text.append(_format_answer_counts(calibration), "dim")
    return text


# Helpers -----------------------------------------------------------------------------------------


def draw_reliability(axes: Any, calibration: Calibration, colour: str, title: str) -> None:
    """Draws the accuracy of each bin, with its Wilson interval, against its mean confidence."""
    held = _list_used_bins(calibration)
    x = [b.confidence for b in held]
    y = [b.accuracy for b in held]
    low = [b.accuracy - b.accuracy_low for b in held]
    high = [b.accuracy_high - b.accuracy for b in held]
    style_axes(axes)
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.vlines(x, x, y, color=colour, alpha=0.25, linewidth=5, zorder=2)
    axes.errorbar(x, y, yerr=(low, high), fmt="none", ecolor=colour, elinewidth=1.2, capsize=3)
    area = [18 + 170 * b.n / calibration.n for b in held]
    axes.scatter(x, y, s=area, color=colour, edgecolor="white", linewidth=0.8, zorder=4)
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=40)
    caption = f"{_format_headline(calibration)}\n{_format_stratum_reference(calibration)}"
    note = axes.text(0, 1.025, caption, transform=axes.transAxes, color=INK, linespacing=1.5)
    note.set(fontsize=8.5, in_layout=False)
    axes.set_title(
        _format_answer_counts(calibration), loc="right", color=FAINT, fontsize=8.5, pad=40
    )


def draw_counts(axes: Any, calibration: Calibration, colour: str) -> None:
    """Draws the histogram of the bins, with counts above the bars."""
    style_axes(axes)
    for b in calibration.bins:
        share = b.n / calibration.n
        axes.bar((b.low + b.high) / 2, share, width=0.9 * (b.high - b.low), color=colour, alpha=0.8)
        if b.n:
            at = ((b.low + b.high) / 2, share)
            axes.annotate(
                f"{b.n}",
                at,
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=INK,
            )
    axes.margins(y=0.22)
    axes.set_xlabel("stated confidence", color=INK)


def _draw_training_curve(axes: Any, name: str, curve: Curve) -> None:
    style_axes(axes)
    steps = [step for step, _ in curve]
    values = [value if math.isfinite(value) else math.nan for _, value in curve]
    noisy = len(values) >= 40
    axes.plot(steps, values, color=BLUE, linewidth=0.8 if noisy else 1.5, alpha=0.3 if noisy else 1)
    if noisy:
        axes.plot(steps, _running_mean(values, len(values) // 20), color=BLUE, linewidth=1.7)
    if len(values) <= 12:
        axes.plot(steps, values, "o", color=BLUE, markersize=3.5)
    axes.set_title(name, loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.tick_params(labelsize=8)


def _running_mean(values: Sequence[float], half: int) -> list[float]:
    """Mean over `half` neighbours on either side; nan near the ends, where it would be noisy."""
    smooth = []
    for i in range(len(values)):
        whole = half <= i < len(values) - half
        near = [v for v in values[i - half : i + half + 1] if math.isfinite(v)] if whole else []
        smooth.append(math.fsum(near) / len(near) if near else math.nan)
    return smooth


def _render_accuracy_bar(accuracy: float, confidence: float, cells: int) -> "Text":
    from rich.text import Text

    eighths = round(accuracy * cells * 8)
    bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
    text = Text(bar.ljust(cells), style="blue")
    at = min(cells - 1, int(confidence * cells))
    return Text.assemble(text[:at], ("┃", "bold yellow"), text[at + 1 :])


def _list_used_bins(calibration: Calibration) -> list[Any]:
    return [b for b in calibration.bins if b.n]


def _format_headline(c: Calibration) -> str:
    return (
        f"accuracy {c.accuracy:.2f} · stated {c.mean_confidence:.2f} · Brier {c.brier:.3f} · "
        f"ECE {c.ece:.3f} · AUROC {_or_dash(c.auroc)}"
    )


def _format_stratum_reference(c: Calibration) -> str:
    """Baseline of the headline: the stratum predictor, and how varied the confidences are."""
    known = f"Brier {c.stratum_brier:.3f}, AUROC {_or_dash(c.stratum_auroc)}"
    varied = f"{len([b for b in c.bins if b.n])} of {len(c.bins)} bins used"
    return f"stratum alone: {known} · {varied}"


def _format_answer_counts(c: Calibration) -> str:
    return f"{c.n} answers, {c.unparsable} unreadable"


def _or_dash(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"
