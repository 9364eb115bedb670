"""What each page shows, as plain JSON values: the template and the JSON twin both get this."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlx_registry import EvaluationRecord, NotFound, Registry, RolloutIndex, RunRecord

__all__ = ["decimate", "rollouts", "run", "runs"]

HEADLINES = (
    *("rewards/accuracy/mean", "rewards/exact_match/mean"),
    *("train/reward_answer", "train/reward", "train/loss"),
)
"""Metrics that may stand for a whole run in the table; the first one that it has does."""

FIGURES = {
    "accuracy": "Accuracy",
    "brier": "Brier score",
    "stratum_brier": "Brier score, knowing only the stratum",
    "ece": "ECE, 10 bins",
    "auroc": "AUROC",
    "stratum_auroc": "AUROC, knowing only the stratum",
    "mean_confidence": "Mean confidence",
    "alike_share": "Answers whose confidences are all alike",
    "unparsable": "Unreadable confidences",
}
"""Figures of an evaluation that come first, in words; the others are folded away."""

LAST = len(FIGURES)

ORDER = {"before": 0, "step": 1, "after": 2}

STRIP = (
    *("id", "name", "seed", "digest", "step", "steps_total", "phase", "attempt", "reason"),
    *("created", "started", "ended", "heartbeat", "directory", "mlflow_run_id"),
)

SHOWN_RUNS = 200
CHART_POINTS = 600

Points = list[tuple[int, float]]


def runs(registry: Registry) -> dict[str, Any]:
    """The newest runs, each with its newest evaluation and the metric that says most about it."""
    return {
        "runs": [
            _strip(row) | {"headline": _headline(registry, row), "newest": _newest(registry, row)}
            for row in registry.runs(limit=SHOWN_RUNS)
        ]
    }


def run(registry: Registry, ref: str) -> dict[str, Any]:
    """One run: state, charts by prefix, evaluations, events, spec."""
    record = registry.run(ref)
    return {
        "run": _strip(record),
        "charts": _charts(registry.metrics(record.id)),
        "evaluations": _evaluations(_told(registry, record)),
        "events": [asdict(event) for event in registry.events(record.id)],
        "figures": FIGURES,
        "history": [asdict(change) for change in registry.history(record.id)],
        "rollout_steps": registry.rollout_steps(record.id),
        "spec": record.spec,
        "yaml": record.yaml,
    }


def rollouts(registry: Registry, ref: str, step: int) -> dict[str, Any]:
    """The trees of one step: under each prompt its answers, under each answer what continues it.

    Raises:
        NotFound: no rollouts of that step are recorded.
    """
    record = registry.run(ref)
    steps = registry.rollout_steps(record.id)
    if step not in steps:
        raise NotFound(f"{record.id} has no rollouts of step {step}")
    at = steps.index(step)
    index = registry.rollout_index(record.id, step)
    return {
        "run": _strip(record),
        "step": step,
        "previous": steps[at - 1] if at else None,
        "next": steps[at + 1] if at + 1 < len(steps) else None,
        "statistics": registry.rollout_body(record.id, step).statistics,
        "largest_advantage": max((abs(item.advantage) for item in index), default=0.0),
        "trees": _trees(index),
    }


def decimate(points: Points, limit: int = CHART_POINTS) -> Points:
    """Thins a series to at most `limit` points, keeping the lowest and highest of every stretch."""
    if len(points) <= limit:
        return points
    stretches = limit // 2
    kept: Points = []
    for i in range(stretches):
        part = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def _strip(record: RunRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in STRIP} | {"status": record.effective_status}


def _headline(registry: Registry, record: RunRecord) -> dict[str, Any] | None:
    found = registry.metrics(record.id, names=HEADLINES)
    for name in HEADLINES:
        if points := found.get(name):
            return {"name": name, "value": points[-1][1], "points": decimate(points, 60)}
    return None


def _told(registry: Registry, record: RunRecord) -> list[EvaluationRecord]:
    """All evaluations but probes, which are curves and no table."""
    every = registry.evaluations(record.id)
    return [e for e in every if not e.suite.startswith("probe/")]


def _newest(registry: Registry, record: RunRecord) -> dict[str, Any] | None:
    """The last evaluation's accuracy, Brier score and ECE, as far as it has them."""
    found = sorted(_told(registry, record), key=lambda e: (ORDER[e.label], e.step))
    if not found:
        return None
    figures = {name: found[-1].metrics.get(name) for name in ("accuracy", "brier", "ece")}
    plain = {n: v if isinstance(v, int | float) else None for n, v in figures.items()}
    return {"label": found[-1].label, **plain}


def _charts(series: Mapping[str, Points]) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, points in series.items():
        prefix = name.rpartition("/")[0]
        chart = {"name": name, "value": points[-1][1], "points": decimate(points)}
        groups.setdefault(prefix, []).append(chart)
    return [{"group": prefix, "metrics": groups[prefix]} for prefix in sorted(groups)]


def _evaluations(records: list[EvaluationRecord]) -> list[dict[str, Any]]:
    """One table per suite: evaluations across, metrics down, and what training changed.

    `bins` are for the reliability diagrams, one list per evaluation that has them.
    """
    tables = []
    for suite in sorted({record.suite for record in records}):
        across = sorted((r for r in records if r.suite == suite), key=lambda r: ORDER[r.label])
        figures = [dict(_flat(record.metrics)) for record in across]
        names = list(dict.fromkeys(name for f in figures for name in f))
        names.sort(key=lambda name: list(FIGURES).index(name) if name in FIGURES else LAST)
        rows = [
            {
                "name": name,
                "values": [f.get(name) for f in figures],
                "change": _change(name, across, figures),
            }
            for name in names
        ]
        columns = [{"label": r.label, "step": r.step, "n": r.n} for r in across]
        bins = [
            {"label": r.label, "step": r.step, "bins": r.metrics["bins"]}
            for r in across
            if r.metrics.get("bins")
        ]
        tables.append({"suite": suite, "columns": columns, "rows": rows, "bins": bins})
    return tables


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):  # such as bins, which are drawn
            flat.append((prefix + name, value))
    return flat


def _change(
    name: str, records: list[EvaluationRecord], figures: list[dict[str, Any]]
) -> float | None:
    ends = {r.label: f.get(name) for r, f in zip(records, figures, strict=True)}
    before, after = ends.get("before"), ends.get("after")
    if isinstance(before, int | float) and isinstance(after, int | float):
        return after - before
    return None


def _trees(index: list[RolloutIndex]) -> list[dict[str, Any]]:
    # Parents come before their children; anything else is shown at the top rather than nowhere.
    nodes = {item.row: asdict(item) | {"children": []} for item in index}
    trees: dict[int, dict[str, Any]] = {}
    for item in index:
        parent = item.parent_row
        if parent is not None and parent < item.row and parent in nodes:
            nodes[parent]["children"].append(nodes[item.row])
        else:
            new = {"tree": item.tree, "problem_id": item.problem_id, "rows": []}
            trees.setdefault(item.tree, new)["rows"].append(nodes[item.row])
    return list(trees.values())
