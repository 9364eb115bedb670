"""The list of runs, grouped by experiment, with means and intervals over seeds."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from rlx_registry import ENDED, Registry, RunNote, RunRow
from rlx_web.pages.columns import (
    Column,
    find_varied_paths,
    list_offered_columns,
    select_columns,
)
from rlx_web.pages.filters import RunLabels, find_matching_runs, list_config_values

__all__ = [
    "HEADLINES",
    "STRIP",
    "build_row_summary",
    "build_run_list_page",
    "compute_mean_cell",
    "live_runs",
]

HEADLINES = ("rewards/accuracy/mean", "rewards/exact_match/mean", "train/reward_answer")
"""Headline metrics of a run in order of preference; the first available one is shown."""

FIGURES = ("accuracy", "brier", "ece")
HELD_OUT = {name: f"eval/held_out/{name}" for name in FIGURES}
SCREEN = 30
"""Experiments per page."""
POINTS = 48
LATE = ("train/reward", "train/loss")
STRIP = tuple(name for name in RunRow.__dataclass_fields__ if name != "directory")


def build_run_list_page(
    registry: Registry, text: str, page: int, asked: Sequence[str] = ()
) -> dict[str, Any]:
    """One page of experiments, newest first, each with its runs and the chosen columns.

    Args:
        text: filter; see `find_matching_runs`.
        page: from 1.
        asked: ids of columns, in order; see `Column`. If empty, the usual ones.

    Raises:
        ColumnError: there is no such column.
    """
    labels = _find_run_labels(registry)
    rows = find_matching_runs(registry, registry.queries.run_rows(), labels, text)
    groups: dict[tuple[str, str], list[RunRow]] = {}
    for row in rows:
        groups.setdefault((row.name, row.digest), []).append(row)
    pages = max(1, math.ceil(len(groups) / SCREEN))
    page = min(page, pages)
    visible = list(groups.values())[(page - 1) * SCREEN : page * SCREEN]
    config = {
        digest: dict(list_config_values(spec))
        for digest, spec in registry.queries.specs({group[0].digest for group in visible}).items()
    }
    varied = find_varied_paths(
        ({group[0].name, *_join_groups(group, labels)}, config[group[0].digest])
        for group in visible
    )
    notes = [labels[row.id].note for group in visible for row in group if row.id in labels]
    columns = select_columns(asked, varied, any(n.tags for n in notes), any(n.note for n in notes))
    metrics = [column.name for column in columns if column.kind == "metric"]
    values = registry.queries.last_values(
        [row.id for group in visible for row in group],
        [*HELD_OUT.values(), *HEADLINES, *LATE, *metrics],
    )
    return {
        "filter": text,
        "groups": [
            _build_experiment_group(registry, group, values, metrics)
            | {"joined": _join_groups(group, labels)}
            | _build_group_labels(group, labels)
            | {"config": _select_config(columns, config[group[0].digest])}
            for group in visible
        ],
        "page": page,
        "pages": pages,
        "total": len(rows),
        "columns": [asdict(column) | {"is_number": column.is_number} for column in columns],
        "offered": [asdict(column) for column in list_offered_columns(columns, varied)],
        "asked": list(asked),
        "config_paths": sorted({path for values in config.values() for path in values}),
        "metric_names": registry.queries.metric_names(visible[0][0].id) if visible else [],
    }


def _find_run_labels(registry: Registry) -> dict[str, RunLabels]:
    """The groups and notes of the runs that have any."""
    joined: dict[str, list[str]] = {}
    for name, members in registry.groups().items():
        for member in members:
            joined.setdefault(member, []).append(name)
    notes = registry.notes.read_all()
    return {
        run: RunLabels(tuple(joined.get(run, ())), notes.get(run, RunNote()))
        for run in {*joined, *notes}
    }


def _join_groups(group: Sequence[RunRow], labels: Mapping[str, RunLabels]) -> list[str]:
    return sorted({name for row in group if row.id in labels for name in labels[row.id].groups})


def _build_group_labels(group: Sequence[RunRow], labels: Mapping[str, RunLabels]) -> dict[str, Any]:
    """The notes and tags of a group's runs, and every tag once."""
    notes = {row.id: labels[row.id].note for row in group if row.id in labels}
    return {
        "notes": {run: {"note": n.note, "tags": list(n.tags)} for run, n in notes.items()},
        "tags": list(dict.fromkeys(tag for n in notes.values() for tag in n.tags)),
    }


def _select_config(columns: Sequence[Column], values: Mapping[str, Any]) -> dict[str, Any]:
    return {c.name: values.get(c.name) for c in columns if c.kind == "config"}


def live_runs(registry: Registry) -> dict[str, Any]:
    """Updates for an open list of runs."""
    alive = registry.queries.supervised_runs()
    values = registry.queries.last_values([row.id for row in alive], list(HELD_OUT.values()))
    return {
        "runs": [
            build_row_summary(row) | {"figures": _get_held_out_figures(values[row.id])}
            for row in alive
        ],
        "statuses": registry.queries.statuses(),
    }


def build_row_summary(row: RunRow) -> dict[str, Any]:
    """A run's status line, with its effective status."""
    plain = asdict(row)
    return {name: plain[name] for name in STRIP} | {"status": row.effective_status}


def compute_mean_cell(values: Sequence[float]) -> dict[str, float | int | None]:
    """Mean over seeds with Student's 95 % interval, which needs at least two seeds."""
    if not values:
        return {"mean": None, "low": None, "high": None, "n": 0}
    mean, half = fmean(values), None
    if len(values) > 1:
        from scipy.special import stdtrit  # imported here because it is slow

        half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return {"mean": mean, "low": low, "high": high, "n": len(values)}


def _build_experiment_group(
    registry: Registry,
    group: Sequence[RunRow],
    values: Mapping[str, Mapping[str, tuple[int, float]]],
    metrics: Sequence[str],
) -> dict[str, Any]:
    newest: dict[int, RunRow] = {}
    for row in group:  # newest first
        if row.status == "finished":
            newest.setdefault(row.seed, row)
    reached = {row.id: _get_held_out_figures(values[row.id]) for row in group}
    ended = [reached[row.id] for row in newest.values()]
    statuses: dict[str, int] = {}
    for row in group:
        statuses[row.effective_status] = statuses.get(row.effective_status, 0) + 1
    folded = {
        name: compute_mean_cell(
            [v["value"] for f in ended if (v := f[name]) is not None and v["step"]]
        )
        for name in FIGURES
    }
    return {
        "name": group[0].name,
        "digest": group[0].digest,
        "seeds": sorted({row.seed for row in group}),
        "created": group[0].created,
        "statuses": statuses,
        "open": len(group) > 1 and any(row.effective_status not in ENDED for row in group),
        "figures": folded,
        "headline": _find_headline_curve(registry, group, values),
        "metrics": {
            name: compute_mean_cell(
                [values[r.id][name][1] for r in newest.values() if name in values[r.id]]
            )
            for name in metrics
        },
        "runs": [
            build_row_summary(row)
            | {"figures": reached[row.id], "duration": _compute_duration(row)}
            | {"metrics": {name: values[row.id].get(name) for name in metrics}}
            for row in group
        ],
    }


def _compute_duration(row: RunRow) -> float | None:
    """Seconds since a run first started, until it ended; None before."""
    return None if row.started is None else (row.ended or time.time()) - row.started


def _get_held_out_figures(
    values: Mapping[str, tuple[int, float]],
) -> dict[str, dict[str, float] | None]:
    """Held-out metrics, with the step after which they were evaluated; 0 is before training."""
    return {
        name: {"step": values[metric][0], "value": values[metric][1]} if metric in values else None
        for name, metric in HELD_OUT.items()
    }


def _find_headline_curve(
    registry: Registry,
    group: Sequence[RunRow],
    values: Mapping[str, Mapping[str, tuple[int, float]]],
) -> dict[str, Any] | None:
    """The headline curve of the newest run that has one."""
    for row in group:
        for name in (*HEADLINES, *LATE):
            if name in values[row.id]:
                points = registry.queries.curves(row.id, [name], POINTS)[name]
                value = values[row.id][name][1]
                return {"name": name, "run": row.id, "value": value, "points": points}
    return None
