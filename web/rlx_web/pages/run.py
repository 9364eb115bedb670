"""The run page: status, curves by section, evaluations, events, and the experiment."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlx_registry import ENDED, FIGURES, Curve, EvaluationRecord, Registry, RunRecord, is_idle
from rlx_web.pages.files import build_log_page, list_run_files, read_run_progress
from rlx_web.pages.runs import build_run_summary, find_headline_curve
from rlx_web.pages.sections import build_metric_sections
from rlx_web.text import list_leaf_values

TITLES = {figure.name: figure.title for figure in FIGURES}
"""Titles of the metrics of an evaluation, in the order of its table."""
MAIN = [figure.name for figure in FIGURES if figure.meaning]
"""Metrics that are shown first; the others are collapsed."""
ORDER = {"before": 0, "step": 1, "after": 2}
RESUMABLE = ("failed", "stopped", "lost")
PACE = 12
"""Number of recent steps used to estimate the remaining time."""
CLOCK = "perf/step_s"
EVENTS = 200
LOG_LINES = 20
NEWS = 2000
"""Maximum number of metric values returned per poll."""

FindLink = Callable[[Sequence[RunRecord]], Any]
"""Returns the page of a tracker that shows some runs, with its `url` and the `store` that a command
must serve first; None if there is none."""


def build_run_page(
    registry: Registry, ref: str, find_link: Callable[[Sequence[RunRecord]], Any]
) -> dict[str, Any]:
    record = registry.run(ref)
    evaluations = registry.results.evaluations(record.id, with_payload=False)
    events = registry.results.events(record.id, limit=EVENTS)
    steps = registry.results.rollout_steps(record.id)
    tracker = find_link([record])
    tables = evaluation_tables(evaluations)
    names = registry.queries.metric_names(record.id)
    newest = registry.queries.last_values([record.id], names)[record.id]
    held_out = [row for table in tables if table["suite"] == "held_out" for row in table["rows"]]
    origins = record.origins or {}
    default = "default" if origins else None  # of options that plugins filled in
    resolved = Path(record.directory or ".") / "spec.json"
    can_resume = record.effective_status in RESUMABLE
    return {
        "run": build_run_summary(record) | {"eta": _compute_remaining_seconds(registry, record)},
        "sections": build_metric_sections(names),
        "latest": {name: {"step": step, "value": value} for name, (step, value) in newest.items()},
        "seq": registry.queries.last_seq(record.id),
        "headline": {  # whether it learns
            "curve": find_headline_curve(registry, [record], {record.id: newest}),
            "held_out": held_out[0] if held_out else None,
        },
        "evaluations": tables,
        "events": [asdict(event) for event in events],
        "events_left_out": registry.queries.count_events(record.id) - len(events),
        "figures": TITLES,
        "main_figures": MAIN,
        "history": [asdict(change) for change in registry.history(record.id)],
        "rollout_steps": {"first": steps[0], "last": steps[-1], "count": len(steps)}
        if steps
        else None,
        "checkpoints": [asdict(c) for c in registry.results.checkpoints(record.id)],
        "artifacts": [asdict(a) for a in registry.results.artifacts(record.id)],
        "files": list_run_files(registry, record),
        "log": build_log_page(registry, record.id)["lines"][-LOG_LINES:],
        "progress": read_run_progress(record),
        "idle_steps": _count_idle_steps(registry, record),
        "plugins": record.plugins,
        "code": record.code,
        "environment": record.environment,
        "spec": record.spec,
        "values": [
            {"path": path, "value": value, "origin": origins.get(path, default)}
            for path, value in list_leaf_values(record.settings)
        ],
        "yaml": record.yaml,
        "commands": {
            "reproduce": f"rlx submit {shlex.quote(str(resolved))} --again",
            "follow": f"rlx logs {record.id} -f",
            "rescore": f"rlx rescore {record.id}",
            "draw plots": f"rlx status {record.id} --pictures",
            **({"resume": f"rlx resume {record.id}"} if can_resume else {}),
        },
        "tracker": tracker and {"url": tracker.url, "store": tracker.store},
    }


def _count_idle_steps(registry: Registry, run: RunRecord) -> int:
    """The latest steps without a gradient; 0 if they are too few for a warning."""
    idle = registry.queries.idle_steps([run.id])[run.id]
    return idle if is_idle(idle, run.step) else 0


def live_run(registry: Registry, ref: str, after: int, event: int) -> dict[str, Any]:
    """Updates for an open run page, which has the metric values until `after` and the events until
    `event`."""
    record = registry.run(ref)
    points: dict[str, Curve] = {}
    for row in registry.results.metric_rows_after(record.id, after, NEWS):
        points.setdefault(row.name, []).append((row.step, row.value))
        after = row.seq
    return {
        "run": build_run_summary(record) | {"eta": _compute_remaining_seconds(registry, record)},
        "progress": read_run_progress(record),
        "idle_steps": _count_idle_steps(registry, record),
        "seq": after,
        "points": points,
        "events": [asdict(e) for e in registry.results.events(record.id, event, EVENTS)],
    }


def evaluation_tables(records: Sequence[EvaluationRecord]) -> list[dict[str, Any]]:
    """One table per suite or probe: evaluations as columns, metrics as rows, and the change by
    training; `bins` are for the reliability diagrams, of each evaluation that has them."""
    tables = []
    suites = sorted({r.suite for r in records}, key=lambda s: (s.startswith("probe/"), s))
    for suite in suites:
        across = sorted(
            (r for r in records if r.suite == suite), key=lambda r: (ORDER[r.label], r.step)
        )
        ends = [r for r in across if r.label != "step"] or across[-1:]
        figures = [dict(_flatten_metrics(record.metrics)) for record in ends]
        by_label = {r.label: found for r, found in zip(ends, figures, strict=True)}
        found = dict.fromkeys(name for f in figures for name in f)
        names = [*(n for n in TITLES if n in found), *(n for n in found if n not in TITLES)]
        intervals = [record.metrics.get("intervals") or {} for record in ends]
        rows = [
            {
                "name": name,
                "values": [f.get(name) for f in figures],
                "intervals": [known.get(name) for known in intervals],
                "change": float(after) - float(before)
                if isinstance(before, int | float) and isinstance(after, int | float)
                else None,
            }
            for name in names
            for before, after in [[by_label.get(e, {}).get(name) for e in ("before", "after")]]
        ]
        columns = [{"label": r.label, "step": r.step, "n": r.n} for r in ends]
        bins = [
            {"label": r.label, "step": r.step, "bins": r.metrics["bins"]}
            for r in ends
            if r.metrics.get("bins")
        ]
        tables.append({"suite": suite, "columns": columns, "rows": rows, "bins": bins})
    return tables


def _flatten_metrics(metrics: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Scalar metrics by dotted name, without lists and intervals."""
    found: list[tuple[str, Any]] = []
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found += [] if name == "intervals" else _flatten_metrics(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            found.append((prefix + name, value))
    return found


def _compute_remaining_seconds(registry: Registry, record: RunRecord) -> float | None:
    """Estimated seconds left at the pace of the last steps; None if unknown."""
    if record.effective_status in ENDED or not record.steps_total:
        return None
    seen = registry.queries.step_times(record.id, CLOCK, last=PACE)
    if len(seen) < 2 or seen[-1][0] <= seen[0][0]:
        return None
    pace = (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
    return max(0.0, pace * (record.steps_total - record.step))
