"""Draws the study's pictures from the registry, one function per picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.evaluation import FAINT, INK, SERIES, build_figure, save_figure, style_axes

if TYPE_CHECKING:
    from study_page import Group

STRATA = ("2 numbers", "3 numbers")
CURVES = {
    "rewards/accuracy/mean": "accuracy of the step",
    "calibration/brier": "Brier score of the step",
    "calibration/alike_share": "answers whose confidences are all alike",
    "rewards/arithmetic/mean": "right, and every sum true",
}
WINDOW = 10
"""Number of steps in the moving average of a curve."""


def draw(groups: "dict[str, Group]", folder: Path) -> None:
    """Draws all pictures for which there are runs."""
    if arms := groups.get("study-arms"):
        over_seeds(arms, folder / "arms")
        one_bit(arms, folder / "one_bit")
        curves(arms, folder / "curves")
        if arms.has("as_trained"):
            labels = ("centred", "σ", "coupled", "accuracy only")
            true_probability(arms, labels, folder / "monte_carlo")
            scaling(arms, "as_trained", folder / "scaling")
    for name in ("shapes", "open", "push"):
        if group := groups.get(f"study-{name}"):
            over_seeds(group, folder / name)


def over_seeds(group: "Group", path: Path) -> None:
    """Plots every seed's figures as dots and their means as lines, one panel per figure."""
    titles = {"brier": "Brier score", "ece_debiased": "ECE, debiased"}
    titles |= {"within_auroc": "AUROC within kinds of problem", "accuracy": "accuracy"}
    drawn = build_figure(3.1 * len(titles), 0.42 * len(group.labels) + 1.2)
    panels = drawn.subplots(1, len(titles), sharey=True)
    for axes, (metric, title) in zip(panels, titles.items(), strict=True):
        style_axes(axes)
        for n, label in enumerate(group.labels):
            values = list(group.measure(label, metric).values())
            axes.plot(values, [n] * len(values), "o", color=SERIES[n % len(SERIES)], alpha=0.6)
            if values:
                axes.plot(np.mean(values), n, "|", color=INK, markersize=16, markeredgewidth=2)
        axes.set_title(title, color=INK, fontsize=10)
    panels[0].set_yticks(range(len(group.labels)), group.labels)
    panels[0].invert_yaxis()
    save_figure(drawn, path)


def one_bit(group: "Group", path: Path) -> None:
    """Plots figures of the stated confidence against those of its one bit, one dot per seed."""
    pairs = {
        "AUROC within kinds of problem": ("within_auroc", "within_one_bit"),
        "Brier score after recalibration": ("brier_recalibrated", "brier_one_bit"),
    }
    drawn = build_figure(8.4, 4.2)
    for axes, (title, (stated, bit)) in zip(drawn.subplots(1, 2), pairs.items(), strict=True):
        style_axes(axes)
        for n, label in enumerate(group.labels):
            of_bit, of_stated = group.measure(label, bit), group.measure(label, stated)
            points = list(of_bit.values()), [of_stated[seed] for seed in of_bit]
            axes.plot(*points, "o", color=SERIES[n % len(SERIES)], alpha=0.7, label=label)
        low, high = min(*axes.get_xlim(), *axes.get_ylim()), max(*axes.get_xlim(), *axes.get_ylim())
        axes.plot([low, high], [low, high], color=FAINT, lw=0.8, ls="--")
        axes.set_title(title, color=INK, fontsize=10)
        axes.set_xlabel("one bit: at least .5", color=FAINT)
        axes.set_ylabel("stated confidence", color=FAINT)
    drawn.axes[0].legend(frameon=False, fontsize=8)
    save_figure(drawn, path)


def curves(group: "Group", path: Path) -> None:
    """Plots training metrics over steps: means over seeds, shaded by the range of the seeds."""
    drawn = build_figure(10, 6.4)
    for axes, (metric, title) in zip(drawn.subplots(2, 2).flat, CURVES.items(), strict=True):
        style_axes(axes)
        for n, label in enumerate(group.labels):
            steps, values = group.curve(label, metric)
            if not values.size:
                continue
            smooth = np.array([_smoothed(own) for own in values])
            colour = SERIES[n % len(SERIES)]
            axes.fill_between(steps, smooth.min(0), smooth.max(0), color=colour, alpha=0.12, lw=0)
            axes.plot(steps, smooth.mean(0), color=colour, label=label)
        axes.set_title(title, color=INK, fontsize=10)
        axes.set_xlabel("step", color=FAINT)
    drawn.axes[0].legend(frameon=False, fontsize=8)
    save_figure(drawn, path)


def _smoothed(values: Sequence[float]) -> Any:
    """Moving average over the window that ends at each step, shorter at the beginning."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(total))
    starts = np.maximum(0, ends - WINDOW)
    return (total[ends] - total[starts]) / (ends - starts)


def true_probability(group: "Group", labels: Sequence[str], path: Path) -> None:
    """Plots how often the model is right on a problem against its mean stated confidence."""
    drawn = build_figure(3.3 * len(labels), 3.6)
    for axes, label in zip(drawn.subplots(1, len(labels), sharey=True), labels, strict=True):
        style_axes(axes)
        axes.plot([0, 1], [0, 1], color=FAINT, lw=0.8, ls="--")
        for colour, stratum in zip(SERIES, STRATA, strict=False):
            right, stated = per_problem(group, label, stratum)
            axes.plot(right, stated, ".", color=colour, alpha=0.35, label=stratum, markersize=5)
        axes.set_title(label, color=INK, fontsize=10)
        axes.set_xlabel("share of right answers", color=FAINT)
    drawn.axes[0].set_ylabel("mean stated confidence", color=FAINT)
    legend = drawn.axes[0].legend(frameon=False, fontsize=8, markerscale=2)
    for handle in legend.legend_handles:
        handle.set_alpha(1.0)
    save_figure(drawn, path)


def per_problem(group: "Group", label: str, stratum: str) -> tuple[Any, Any]:
    """P(correct) and the mean stated confidence for every problem of a kind and every seed."""
    right, stated = [], []
    for payload in group.payloads(label, "as_trained"):
        ids, kinds = np.array(payload["problem_ids"]), np.array(payload["strata"])
        correct = np.array(payload["correct"], dtype=float)
        confidence = np.array([c or 0.0 for c in payload["confidence"]])
        for problem in np.unique(ids[kinds == stratum]):
            own = ids == problem
            right.append(correct[own].mean())
            stated.append(confidence[own].mean())
    return np.array(right), np.array(stated)


def scaling(group: "Group", suite: str, path: Path) -> None:
    """What several answers are worth, chosen by confidence or by vote: a panel per way."""
    ways = {"majority": "majority vote", "weighted": "vote weighted by confidence"}
    ways |= {"most_confident": "the most confident answer"}
    drawn = build_figure(3.4 * len(ways), 3.4)
    for axes, (way, title) in zip(
        drawn.subplots(1, len(ways), sharey=True), ways.items(), strict=True
    ):
        style_axes(axes)
        for n, label in enumerate(group.labels):
            found = [each["scaling"] for each in group.metrics(label, suite)]
            if found:
                k = found[0]["k"]
                mean = np.mean([each[way] for each in found], axis=0)
                axes.plot(k, mean, "o-", color=SERIES[n % len(SERIES)], label=label, markersize=4)
                axes.set_xscale("log", base=2)
                axes.set_xticks(k, [str(each) for each in k])
        axes.set_title(title, color=INK, fontsize=10)
        axes.set_xlabel("answers", color=FAINT)
    drawn.axes[0].set_ylabel("accuracy", color=FAINT)
    drawn.axes[0].legend(frameon=False, fontsize=8)
    save_figure(drawn, path)
