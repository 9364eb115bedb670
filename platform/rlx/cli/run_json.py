"""A run as `rlx status --json` and `rlx runs --json` print it."""

from typing import Any

from rlx.launch import get_run_exit_code
from rlx_registry import Registry, RunRecord

__all__ = ["run_json"]


def run_json(registry: Registry, run: RunRecord) -> dict[str, Any]:
    """Returns a run as `rlx status --json` and `rlx runs --json` print it."""
    evaluations = {e.label: e for e in registry.results.evaluations(run.id, "held_out")}
    main_metrics = ("accuracy", "brier", "ece", "auroc", "n", "problems")
    metrics = (
        *main_metrics,
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
    return {
        "run": run.id,
        "name": run.name,
        "status": run.effective_status,
        "reason": run.reason,
        "exit_code": get_run_exit_code(registry, run),
        "step": run.step,
        "steps": run.steps_total,
        "phase": run.phase,
        "steps_without_gradient": registry.queries.count_idle_steps(run.id),
        "seed": run.seed,
        "groups": registry.list_run_groups(run.id),
        "spec_digest": run.digest,
        "attempt": run.attempt,
        "created": run.created,
        "started": run.started,
        "ended": run.ended,
        "directory": run.directory,
        "mlflow_run_id": run.mlflow_run_id,
        "evaluation": {
            label: {
                name: evaluations[label].metrics.get(name)
                for name in metrics
                if name in main_metrics or name in evaluations[label].metrics
            }
            for label in ("before", "after")
            if label in evaluations
        },
        "suites": _collect_suite_figures(registry, run),
    }


def _collect_suite_figures(registry: Registry, run: RunRecord) -> dict[str, dict[str, Any]]:
    """Returns the main figures of the last evaluation of each label, by held-out set and label."""
    suites: dict[str, dict[str, Any]] = {}
    for e in registry.results.evaluations(run.id):
        if not e.suite.startswith("probe/"):
            values = {k: e.metrics.get(k) for k in ("n", "accuracy", "rewards", "environment")}
            figures = {k: v for k, v in values.items() if v is not None}
            suites.setdefault(e.suite, {})[e.label] = figures
    return suites
