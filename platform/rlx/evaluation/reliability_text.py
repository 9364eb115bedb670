"""The reliability diagram as text, for terminals."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

Figures = Mapping[str, Any]
"""Figures of answers as plain JSON, as they are recorded."""


def render_reliability_text(calibration: Figures, *, width: int = 80) -> "Text":
    """Draws a reliability diagram as text, one line per non-empty bin.

    The bar is the accuracy. The mark is the mean confidence, where the bar would end under perfect
    calibration.

    Args:
        calibration: figures of `measure_calibration`.
        width: columns to use, at least 66.

    Returns:
        A rich `Text`; its `plain` is the same without colour.
    """
    from rich.text import Text

    cells = max(width, 66) - 38
    text = Text(no_wrap=True)
    text.append(f"{'confidence':<12}{'accuracy █ against stated ┃':<{cells}}", "bold")
    text.append(f"{'stated':>8}{'right':>7}{'n':>7}\n", "bold")
    for b in list_held_bins(calibration):
        text.append(f"{b['low']:.1f} to {b['high']:.1f}  ", "dim")
        whole, eighths = divmod(round(b["accuracy"] * cells * 8), 8)
        bar = Text(f"{'█' * whole}{('', *'▏▎▍▌▋▊▉')[eighths]}".ljust(cells), style="blue")
        at = min(cells - 1, int(b["confidence"] * cells))
        text.append_text(Text.assemble(bar[:at], ("┃", "bold yellow"), bar[at + 1 :]))
        text.append(f"{b['confidence']:>8.2f}{b['accuracy']:>7.2f}{b['n']:>7}\n")
    text.append(f"{format_headline(calibration)}\n{format_stratum_reference(calibration)}\n", "dim")
    text.append(format_answer_counts(calibration), "dim")
    return text


def list_held_bins(calibration: Figures) -> list[Figures]:
    """The bins that are not empty."""
    return [b for b in calibration["bins"] if b["n"]]


def format_headline(c: Figures) -> str:
    """Accuracy, mean confidence and the chief measures of calibration, in one line."""
    return (
        f"accuracy {c['accuracy']:.2f} · stated {c['mean_confidence']:.2f} · Brier "
        f"{c['brier']:.3f} · ECE {c['ece']:.3f} · AUROC {_or_dash(c['auroc'])}"
    )


def format_stratum_reference(c: Figures) -> str:
    """Baseline of the headline: the stratum predictor, and how varied the confidences are."""
    known = f"Brier {c['stratum_brier']:.3f}, AUROC {_or_dash(c['stratum_auroc'])}"
    return f"stratum alone: {known} · {len(list_held_bins(c))} of {len(c['bins'])} bins used"


def format_answer_counts(c: Figures) -> str:
    """How many answers there were, and how many stated no readable confidence."""
    return f"{c['n']} answers, {c['unparsable']} unreadable"


def _or_dash(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"
