"""The comparison page: differences between experiments, then their curves and evaluations."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlx_registry import EvaluationRecord, Registry, RunRecord
from rlx_web.pages.run import (
    FIGURES,
    FindLink,
    build_run_summary,
    build_tracker_link,
    flatten_metrics,
    get_metric_interval,
    list_leaf_values,
)
from rlx_web.pages.runs import compute_mean_cell
from rlx_web.pages.sections import build_metric_sections

COMPARED_RUNS = 24
"""Maximum number of runs compared at once."""
NOT_COMPARED = ("name", "seed")


def build_comparison_page(
    registry: Registry, refs: Sequence[str], find_link: FindLink
) -> dict[str, Any]:
    """Compares runs; runs that differ only in their seeds form one recipe.

    Metrics are those after training, from the newest run of each seed that has them.

    Args:
        refs: run ids, or names of groups or experiments, which stand for all their runs.
    """
    every = _select_named_runs(registry, refs)
    records = every[-COMPARED_RUNS:]
    recipes: dict[str, list[RunRecord]] = {}
    for record in records:
        recipes.setdefault(record.digest, []).append(record)
    names = [set(registry.queries.metric_names(r.id)) for r in records]
    evaluations = {
        r.id: _select_after_evaluations(registry.queries.evaluation_figures(r.id)) for r in records
    }
    labelled = [
        {
            "label": _format_recipe_label(n),
            "name": some[0].name,
            "digest": digest,
            "runs": [build_run_summary(r) for r in some],
        }
        for n, (digest, some) in enumerate(recipes.items())
    ]
    return {
        "refs": list(refs),
        "tracker": build_tracker_link(records, find_link),
        "recipes": labelled,
        "left_out": [run.id for run in every[:-COMPARED_RUNS]],
        "without": [run.id for run in records if not evaluations[run.id]],
        "spec": _find_spec_differences([some[0] for some in recipes.values()]),
        "sections": [
            {"title": s.title, "charts": [{"title": c.title, "curves": c.curves} for c in s.charts]}
            for s in build_metric_sections(sorted(set().union(*names)) if names else [])
        ],
        "suites": _build_suite_tables(list(recipes.values()), evaluations),
    }


def _select_named_runs(registry: Registry, refs: Sequence[str]) -> list[RunRecord]:
    """The runs of all references, each once; runs of one name from oldest to newest."""
    groups = registry.groups()
    found: dict[str, RunRecord] = {}
    for ref in refs:
        several = [registry.run(run) for run in groups.get(ref, ())] or sorted(
            registry.runs(name=ref), key=lambda run: run.created
        )
        for run in several or [registry.run(ref)]:
            found.setdefault(run.id, run)
    return list(found.values())


def _format_recipe_label(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"R{number + 1}"


def _select_after_evaluations(records: Sequence[EvaluationRecord]) -> dict[str, EvaluationRecord]:
    """The newest evaluation after training of every suite, without probes."""
    found: dict[str, EvaluationRecord] = {}
    for record in sorted(records, key=lambda r: r.at):
        if record.label == "after" and not record.suite.startswith("probe/"):
            found[record.suite] = record
    return found


def _find_spec_differences(firsts: Sequence[RunRecord]) -> list[dict[str, Any]]:
    specs = [dict(list_leaf_values(record.settings)) for record in firsts]
    paths = dict.fromkeys(path for spec in specs for path in spec)
    rows = {path: [spec.get(path) for spec in specs] for path in paths if path not in NOT_COMPARED}
    return [
        {"path": path, "values": row}
        for path, row in rows.items()
        if any(value != row[0] for value in row)
    ]


def _build_suite_tables(
    recipes: Sequence[Sequence[RunRecord]],
    evaluations: Mapping[str, Mapping[str, EvaluationRecord]],
) -> list[dict[str, Any]]:
    suites = sorted({suite for found in evaluations.values() for suite in found})
    return [
        {
            "suite": suite,
            "rows": _build_metric_rows(
                [_select_seed_evaluations(some, suite, evaluations) for some in recipes]
            ),
        }
        for suite in suites
    ]


def _select_seed_evaluations(
    runs: Sequence[RunRecord], suite: str, evaluations: Mapping[str, Mapping[str, EvaluationRecord]]
) -> list[EvaluationRecord]:
    """One evaluation per seed, from its newest run."""
    newest = {run.seed: evaluations[run.id][suite] for run in runs if suite in evaluations[run.id]}
    return list(newest.values())


def _build_metric_rows(cells: Sequence[Sequence[EvaluationRecord]]) -> list[dict[str, Any]]:
    """One row per metric and one cell per recipe: over seeds, or one run with its own interval."""
    rows = []
    for metric in FIGURES:
        row = [_build_metric_cell(some, metric) for some in cells]
        if any(cell["n"] for cell in row):
            rows.append({"metric": metric, "cells": row})
    return rows


def _build_metric_cell(records: Sequence[EvaluationRecord], metric: str) -> dict[str, Any]:
    values = [dict(flatten_metrics(e.metrics)).get(metric) for e in records]
    known = [float(v) for v in values if isinstance(v, int | float)]
    if (
        len(records) == len(known) == 1
        and (own := get_metric_interval(records[0], metric)) is not None
    ):
        return {"mean": known[0], "low": own[0], "high": own[1], "n": 1, "over": "problems"}
    return compute_mean_cell(known) | {"over": "seeds"}
