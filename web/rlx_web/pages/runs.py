"""The list of runs, grouped by experiment, with means and intervals over seeds."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from rlx_registry import ENDED, LIVING, Registry, RunRecord, RunRow
from rlx_web.text import list_leaf_values

HEADLINES = ("rewards/accuracy/mean", "rewards/exact_match/mean", "train/reward_answer")
"""Headline metrics of a run in order of preference; the first available one is shown."""
FIGURES = {"accuracy": "Accuracy", "brier": "Brier", "ece": "ECE"}
"""Figures of the held-out evaluation, shown where a run has them, with their titles."""
HELD_OUT = {name: f"eval/held_out/{name}" for name in FIGURES}
EXPERIMENTS_PER_PAGE = 30
SPARKLINE_POINTS = 48
FALLBACKS = ("train/reward", "train/loss")
"""Metrics shown instead of a headline."""
STRIP = tuple(name for name in RunRow.__dataclass_fields__ if name != "directory")
"""Fields of a run's status line."""


def build_run_list_page(registry: Registry, text: str, page: int) -> dict[str, Any]:
    """One page of experiments, newest first, each with its runs. Every word of the filter `text`
    occurs in a run's id, name, digest, status, machine or groups, or is `status:running`,
    `group:seeds`, or a value of its experiment, defaults of plugins included, such as `seed:3` or
    `normalize:center`."""
    joined: dict[str, list[str]] = defaultdict(list)
    for name, members in registry.groups().items():
        for member in members:
            joined[member].append(name)
    words = text.lower().split()
    rows = registry.queries.run_rows()
    texts = {
        row.id: " ".join(
            (row.id, row.name, row.digest, row.effective_status, row.host or "", *joined[row.id])
        ).lower()
        for row in rows
    }
    rows = [row for row in rows if all(word in texts[row.id] for word in words if ":" not in word)]
    if settings := [word for word in words if ":" in word]:
        having = {
            run.id
            for run in registry.runs()
            if all(_has_setting(run, joined[run.id], word) for word in settings)
        }
        rows = [row for row in rows if row.id in having]
    groups: dict[tuple[str, str], list[RunRow]] = {}
    for row in rows:
        groups.setdefault((row.name, row.digest), []).append(row)
    pages = max(1, math.ceil(len(groups) / EXPERIMENTS_PER_PAGE))
    page = min(page, pages)
    first = (page - 1) * EXPERIMENTS_PER_PAGE
    visible = list(groups.values())[first : first + EXPERIMENTS_PER_PAGE]
    values = registry.queries.last_values(
        [row.id for group in visible for row in group],
        [*HELD_OUT.values(), *HEADLINES, *FALLBACKS],
    )
    shown = {name for found in values.values() for name in found}
    return {
        "filter": text,
        "groups": [
            _build_experiment_group(registry, group, values)
            | {"joined": sorted({name for row in group for name in joined[row.id]})}
            for group in visible
        ],
        "page": page,
        "pages": pages,
        "total": len(rows),
        "figures": {name: title for name, title in FIGURES.items() if HELD_OUT[name] in shown},
    }


def _has_setting(run: RunRecord, groups: Sequence[str], word: str) -> bool:
    """Whether a word is KEY:VALUE of a run, with the end of a path of its experiment as its key."""
    key, _, value = word.partition(":")
    own = [("status", run.effective_status), ("name", run.name), ("seed", run.seed)]
    own += [("group", group) for group in groups]
    return any(
        f".{path}".lower().endswith(f".{key}")
        and str(found if isinstance(found, str) else json.dumps(found)).lower() == value
        for path, found in [*own, *list_leaf_values(run.settings)]
    )


def live_runs(registry: Registry) -> dict[str, Any]:
    alive = registry.queries.run_rows(LIVING)
    values = registry.queries.last_values([row.id for row in alive], list(HELD_OUT.values()))
    return {
        "runs": [
            build_run_summary(row) | {"figures": _get_held_out_figures(values[row.id])}
            for row in alive
        ],
        "statuses": registry.queries.statuses(),
    }


def build_run_summary(run: RunRow | RunRecord) -> dict[str, Any]:
    """A run's status line, with its effective status."""
    return {name: getattr(run, name) for name in STRIP} | {"status": run.effective_status}


def _compute_mean_cell(values: Sequence[float]) -> dict[str, float | int | None]:
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
) -> dict[str, Any]:
    newest: dict[int, RunRow] = {}
    for row in group:  # newest first
        if row.status == "finished":
            newest.setdefault(row.seed, row)
    reached = {row.id: _get_held_out_figures(values[row.id]) for row in group}
    ended = [reached[row.id] for row in newest.values()]
    folded = {
        name: _compute_mean_cell(
            [v["value"] for f in ended if (v := f[name]) is not None and v["step"]]
        )
        for name in FIGURES
    }
    return {
        "name": group[0].name,
        "digest": group[0].digest,
        "seeds": sorted({row.seed for row in group}),
        "created": group[0].created,
        "statuses": Counter(row.effective_status for row in group),
        "open": len(group) > 1 and any(row.effective_status not in ENDED for row in group),
        "figures": folded,
        "headline": find_headline_curve(registry, group, values),
        "runs": [build_run_summary(row) | {"figures": reached[row.id]} for row in group],
    }


def _get_held_out_figures(
    values: Mapping[str, tuple[int, float]],
) -> dict[str, dict[str, float] | None]:
    """Held-out metrics, with the step after which they were evaluated; 0 is before training."""
    return {
        name: {"step": values[metric][0], "value": values[metric][1]} if metric in values else None
        for name, metric in HELD_OUT.items()
    }


def find_headline_curve(
    registry: Registry,
    group: Sequence[RunRow | RunRecord],
    values: Mapping[str, Mapping[str, tuple[int, float]]],
) -> dict[str, Any] | None:
    """The headline curve of the newest run that has one."""
    for row in group:
        for name in (*HEADLINES, *FALLBACKS):
            if name in values[row.id]:
                points = registry.queries.curves(row.id, [name], SPARKLINE_POINTS)[name]
                value = values[row.id][name][1]
                return {"name": name, "run": row.id, "value": value, "points": points}
    return None
