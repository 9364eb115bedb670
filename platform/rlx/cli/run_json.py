"""Runs as `rlx status --json` and `rlx runs --json` print them."""

from collections.abc import Sequence
from typing import Any

from rlx.launch import choose_run_exit_code
from rlx_registry import EvaluationFigures, Registry, RunRecord

__all__ = ["describe_runs"]

_MAIN = ("accuracy", "brier", "ece", "auroc", "n", "problems")
_METRICS = (
    *_MAIN,
    "brier_recalibrated",
    "ece_debiased",
    "auroc_one_bit",
    "stratum_brier",
    "stratum_auroc",
    "within_auroc",
    "alike_share",
    "unparsable",
    "by_stratum",
    "rewards",
)


def describe_runs(registry: Registry, runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Returns runs as JSON values, with as many queries for many as for one."""
    ids = [run.id for run in runs]
    evaluations = registry.lists.evaluation_figures(ids)
    failures = registry.lists.failures(ids)
    groups, idle = registry.lists.groups(ids), registry.lists.idle_steps(ids)
    return [
        {
            "run": run.id,
            "name": run.name,
            "status": run.effective_status,
            "reason": run.reason,
            "exit_code": choose_run_exit_code(run, failures),
            "step": run.step,
            "steps": run.steps_total,
            "phase": run.phase,
            "steps_without_gradient": idle[run.id],
            "seed": run.seed,
            "groups": groups[run.id],
            "spec_digest": run.digest,
            "attempt": run.attempt,
            "created": run.created,
            "started": run.started,
            "ended": run.ended,
            "directory": run.directory,
            "mlflow_run_id": run.mlflow_run_id,
            "evaluation": _select_held_out_figures(evaluations[run.id]),
            "suites": _collect_suite_figures(evaluations[run.id]),
        }
        for run in runs
    ]


def _select_held_out_figures(evaluations: Sequence[EvaluationFigures]) -> dict[str, dict[str, Any]]:
    """The figures of a run's held-out set before and after training."""
    found = {e.label: e.metrics for e in evaluations if e.suite == "held_out"}
    return {
        label: {
            name: found[label].get(name)
            for name in _METRICS
            if name in _MAIN or name in found[label]
        }
        for label in ("before", "after")
        if label in found
    }


def _collect_suite_figures(evaluations: Sequence[EvaluationFigures]) -> dict[str, dict[str, Any]]:
    """The main figures of the last evaluation of each label, by held-out set and label."""
    suites: dict[str, dict[str, Any]] = {}
    for e in evaluations:
        if not e.suite.startswith("probe/"):
            values = {k: e.metrics.get(k) for k in ("n", "accuracy", "rewards", "environment")}
            figures = {k: v for k, v in values.items() if v is not None}
            suites.setdefault(e.suite, {})[e.label] = figures
    return suites
