"""Plot the distributions of turn rewards and lengths over training steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlx.evaluation.style import BLUE, INK, build_figure, save_figure, style_axes

__all__ = ["TurnDistribution", "draw_distributions"]

BINS = 24


@dataclass(frozen=True, slots=True)
class TurnDistribution:
    """The turns of one kind that a step trained on.

    Attributes:
        step: step number.
        rewards: weighted reward totals of the turns that have one.
        lengths: lengths in tokens.
    """

    step: int
    rewards: Sequence[float]
    lengths: Sequence[int]


def draw_distributions(
    kinds: Mapping[str, Sequence[TurnDistribution]], path: Path
) -> tuple[Path, Path]:
    """Draws vertical histograms side by side, one per step; darker means more turns.

    Args:
        kinds: distributions by kind of turn ("answer", "confidence", ...), each in order of steps.
        path: output path; its suffix is replaced by `.png` and `.svg`.

    Returns:
        The two files.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not kinds:
        raise ValueError("no turns to draw")
    drawn = build_figure(9.2, 2.4 * len(kinds) + 0.35, w_pad=0.1, h_pad=0.08)
    panels = drawn.subplots(len(kinds), 2, sharex=True, squeeze=False)
    for row, (kind, spreads) in zip(panels, kinds.items(), strict=True):
        for axes, name in zip(row, ("rewards", "lengths"), strict=True):
            style_axes(axes)
            label = "reward" if name == "rewards" else "tokens"
            axes.set_title(f"{kind}: {label}", loc="left", fontsize=10, color=INK, weight="bold")
            _draw_histograms(axes, [(s.step, list(getattr(s, name))) for s in spreads])
    drawn.supxlabel("step", color=INK, fontsize=10)
    return save_figure(drawn, path)


def _draw_histograms(axes: object, spreads: Sequence[tuple[int, Sequence[float]]]) -> None:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap

    assert isinstance(axes, Axes)
    everything = np.array([value for _, values in spreads for value in values], dtype=np.float64)
    if not len(everything):
        return
    low, high = float(everything.min()), float(everything.max())
    edges = np.linspace(low, high, BINS + 1) if high > low else np.array([low - 0.5, low + 0.5])
    counts = np.array([np.histogram(values, bins=edges)[0] for _, values in spreads], dtype=float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    steps = np.array([step for step, _ in spreads], dtype=float)
    gaps = np.diff(steps) / 2 if len(steps) > 1 else np.array([0.5])
    borders = np.concatenate([[steps[0] - gaps[0]], steps[:-1] + gaps[: len(steps) - 1]])
    borders = np.append(borders, steps[-1] + gaps[-1])
    colours = LinearSegmentedColormap.from_list("share", ["white", BLUE])
    axes.pcolormesh(borders, edges, shares.T, cmap=colours, vmin=0, vmax=shares.max())
    means = [float(np.mean(values)) if values else np.nan for _, values in spreads]
    axes.plot(steps, means, color=INK, linewidth=1.2)
    axes.tick_params(labelsize=8)
