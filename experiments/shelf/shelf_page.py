"""Writes shelf.md, its tables and its picture, from stored results."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rules import RULES, Answers, compute_rule_figures
from ways import SAMPLED, SOME, TASKS, WAYS, Way

from rlx.evaluation import (
    FAINT,
    INK,
    SERIES,
    build_figure,
    compute_paired_difference,
    compute_seed_mean,
    save_figure,
    style_axes,
)

__all__ = ["write_page"]

Result = Mapping[str, Any]
Results = Mapping[tuple[str, str], Mapping[int, Result]]
PAGE = Path(__file__).with_name("shelf.md")
TEMPLATE = Path(__file__).with_name("page.md")
REFERENCE = "centred"
SEEDS = 5
"""Seeds that each way is to have."""
EDGE = 0.05
"""Confidences at most so far from 0 or 1 are at the edge."""

URN = {
    "distance": "mean abs. error",
    "slope": "slope",
    "edge": "at 0 or 1",
    "brier": "Brier",
    "unparsable": "unreadable",
    "cpu": "CPU-s",
}
BY_TASK: dict[str, dict[str, str]] = {
    "urn": URN,
    "misled": URN,
    "longer": URN,
    "four": {
        "accuracy": "accuracy",
        "brier": "Brier",
        "brier_recalibrated": "recalibrated",
        "ece_debiased": "ECE, debiased",
        "auroc": "AUROC",
        "auroc_one_bit": "AUROC of one bit",
        "within_auroc": "AUROC within families",
        "cpu": "CPU-s",
    },
    "countdown": {
        "accuracy": "accuracy",
        "brier": "Brier",
        "brier_recalibrated": "recalibrated",
        "ece_debiased": "ECE, debiased",
        "auroc": "AUROC",
        "auroc_one_bit": "AUROC of one bit",
        "within_auroc": "AUROC within kinds",
        "cpu": "CPU-s",
    },
}
"""Columns of each task's table: figure and head."""
RULE_FIGURES = {
    "brier": "Brier",
    "ece_debiased": "ECE, debiased",
    "auroc": "AUROC",
    "within_auroc": "AUROC within kinds",
}
"""Columns of the rules' tables."""
COMPARED = {
    **dict.fromkeys(("urn", "misled", "longer"), "distance"),
    **dict.fromkeys(("four", "countdown"), "brier"),
}
"""The figure of each task that is compared with the reference, lower is better."""


def write_page(results: Results) -> None:
    """Writes the page and its picture.

    Args:
        results: stored results by task and way, and by seed; empty where there are none.
    """
    import jinja2

    draw_curves(results, PAGE.with_suffix(""))
    rules = {f"{task}_{way}_rules": build_rule_table(results[task, way]) for task, way in SAMPLED}
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    tables = {f"{task}_table": build_table(results, task) for task in TASKS}
    missing = {f"{task}_missing": describe_missing(results, task) for task in TASKS}
    PAGE.write_text(template.render(**tables, **missing, **rules), encoding="utf-8")


def compute_figures(task: str, result: Result) -> dict[str, float]:
    """The figures of one run; without those that it does not have."""
    after = result["after"]
    found = {key: after.get(key) for key in BY_TASK[task]}
    found["unparsable"] = after["unparsable"] / after["n"]
    found["cpu"] = result["cpu_seconds"]
    if BY_TASK[task] is URN:
        true, stated = read_pairs(result)
        found["distance"] = float(np.abs(stated - true).mean())
        found["slope"] = float(np.polyfit(true, stated, 1)[0])
        found["edge"] = float(((stated <= EDGE) | (stated >= 1 - EDGE)).mean())
    return {key: float(value) for key, value in found.items() if value is not None}


def read_pairs(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Shares of red balls and readable confidences of a run on the urn."""
    answers = result["answers"]
    true = np.array([int(stratum.split()[0]) for stratum in answers["strata"]]) / 10
    stated = np.array([np.nan if c is None else c for c in answers["stated"]])
    there = ~np.isnan(stated)
    return true[there], stated[there]


def build_table(results: Results, task: str) -> str:
    """One row per way that has results; empty if none has."""
    heads = BY_TASK[task]
    lines = [["way", "paper", "experiment", "seeds", *heads.values(), f"− {REFERENCE}", "verdict"]]
    reference = _read_figure(results[task, REFERENCE], task, COMPARED[task])
    for way in WAYS:
        runs = results[task, way.name]
        if not runs:
            continue
        own = [_read_figure(runs, task, key) for key in heads]
        cells = [
            show_mean(list(figures.values()), key) for key, figures in zip(heads, own, strict=True)
        ]
        gap = show_gap(_read_figure(runs, task, COMPARED[task]), reference)
        spec = Path(str(way.find_spec(task)))
        link = f"[{spec.name}](../{spec.as_posix()})"
        lines.append(
            [way.label, way.paper, link, str(len(runs)), *cells, gap, way.get_verdict(task)]
        )
    return format_table(lines) if len(lines) > 1 else ""


def build_rule_table(runs: Mapping[int, Result]) -> str:
    """One row per rule: what it predicts of one way's answers; empty if none are stored.

    The last column is the difference of its Brier score from that of the stated confidence.
    """
    sampled = {
        seed: Answers.from_stored(run["samples"]) for seed, run in runs.items() if "samples" in run
    }
    if not sampled:
        return ""
    lines = [["predictor", "seeds", *RULE_FIGURES.values(), "− stated"]]
    stated: Mapping[int, float] | None = None
    for rule in RULES:
        figures = {seed: compute_rule_figures(rule, answers) for seed, answers in sampled.items()}
        own = {key: [f[key] for f in figures.values() if key in f] for key in RULE_FIGURES}
        brier = {seed: found["brier"] for seed, found in figures.items()}
        stated = brier if stated is None else stated
        cells = [show_mean(values, key) for key, values in own.items()]
        lines.append([rule.label, str(len(sampled)), *cells, show_gap(brier, stated)])
    return format_table(lines)


def _read_figure(runs: Mapping[int, Result], task: str, key: str) -> dict[int, float]:
    figures = {seed: compute_figures(task, result) for seed, result in runs.items()}
    return {seed: own[key] for seed, own in figures.items() if key in own}


def show_mean(values: Sequence[float], key: str) -> str:
    """A mean over seeds with half of its 95 % interval by Student's t."""
    if not values:
        return "–"
    found = compute_seed_mean(values)
    if key == "cpu":
        return f"{found.mean:.0f}"
    if found.low is None or found.high is None:
        return f"{found.mean:.3f}"
    return f"{found.mean:.3f} ± {(found.high - found.low) / 2:.3f}"


def show_gap(own: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """The mean difference from the reference, paired by seed, with its 95 % interval."""
    shared = sorted(own.keys() & reference.keys())
    if len(shared) < 2 or own == reference:
        return "–"
    found = compute_paired_difference(own, reference)
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def format_table(lines: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table; the first line is its head."""
    head, *rows = lines
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def describe_missing(results: Results, task: str) -> str:
    """Names the ways without results, without an experiment for the task, and with few seeds."""
    without = [w.label for w in WAYS if w.find_spec(task) and not results[task, w.name]]
    unwritten = [w.label for w in WAYS if not w.find_spec(task) and task not in SOME]
    said = [f"Not trained yet: {'; '.join(without)}."] if without else []
    said += [f"No experiment yet: {'; '.join(unwritten)}."] if unwritten else []
    few = [w.label for w in WAYS if 0 < len(results[task, w.name]) < SEEDS]
    said += [f"Fewer than {SEEDS} seeds yet: {'; '.join(few)}."] if few else []
    return " ".join(said) or "Nothing is missing."


def draw_curves(results: Results, path: Path) -> None:
    """Plots the mean stated confidence over the true one, a panel per way, a line per seed."""
    ways = [way for way in WAYS if results["urn", way.name]]
    if not ways:
        return
    rows = -(-len(ways) // 5)
    drawn = build_figure(11, 2.4 * rows + 0.3)
    panels = drawn.subplots(rows, 5, sharex=True, sharey=True, squeeze=False).flat
    for axes, way in zip(panels, [*ways, *[None] * (5 * rows - len(ways))], strict=True):
        if way is None:
            axes.set_axis_off()
            continue
        _draw_way(axes, way, results["urn", way.name])
    save_figure(drawn, path)


def _draw_way(axes: Any, way: Way, runs: Mapping[int, Result]) -> None:
    style_axes(axes)
    axes.plot([0, 1], [0, 1], color=FAINT, lw=0.8, ls="--")
    for colour, result in zip(SERIES, runs.values(), strict=False):
        true, stated = read_pairs(result)
        shares = np.unique(true)
        means = [stated[true == share].mean() for share in shares]
        axes.plot(shares, means, color=colour, lw=1.2, alpha=0.8)
    axes.set_title(way.label, color=INK, fontsize=7.5)
