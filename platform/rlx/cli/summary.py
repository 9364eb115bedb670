"""Prints the summary of a finished run."""

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from rlx.cli.console import build_table
from rlx.cli.mlflow_page import describe_mlflow_page
from rlx.launch import locate_run_folder
from rlx.text import escape_unprintable
from rlx_registry import IDLE_STEPS, EvaluationRecord, Registry, RunRecord

__all__ = ["show_run_summary"]

WARM_START_LOSS = "warm_start/loss"
ROWS = (
    ("accuracy", "accuracy", "higher is better"),
    ("brier", "Brier score", "lower is better"),
    ("brier_recalibrated", "  recalibrated out of fold", "near Brier: calibrated"),
    ("stratum_brier", "  knowing only the stratum", "what Brier must beat"),
    ("auroc", "AUROC", "higher is better"),
    ("auroc_one_bit", "  of at least .5, yes or no", "below AUROC: more than one bit"),
    ("stratum_auroc", "  knowing only the stratum", "what AUROC must beat"),
    ("within_auroc", "  among problems of one kind", "above 0.5: it knows more than the kind"),
    ("ece", "ECE, 10 bins", "lower is better"),
    ("ece_debiased", "  without small-sample bias", "lower is better"),
    ("mean_confidence", "mean confidence", "near accuracy"),
    ("alike_share", "all confidences alike", "1 is a frozen policy"),
    ("unparsable", "unparsable confidences", "count as 0"),
)


def show_run_summary(registry: Registry, run: RunRecord, console: Console) -> None:
    """Prints held-out metrics before and after training, the reliability diagram, and paths."""
    records = {e.label: e for e in registry.results.evaluations(run.id, "held_out")}
    evaluations = {label: record.metrics for label, record in records.items()}
    before, after = evaluations.get("before", {}), evaluations.get("after", {})
    sample_size = _describe_sample_size(records.get("after"))
    title = f"{escape_unprintable(run.name)} {run.id}, seed {run.seed}{sample_size}"
    console.print(title, style="bold")
    table = build_table("", "before", "after", "change", Column(""), padding=(0, 2, 0, 0))
    for name, label, meaning in ROWS:
        if after.get(name) is not None:
            table.add_row(label, *_format_change_cells(before.get(name), after[name]), meaning)
    for stratum, figures in (after.get("by_stratum") or {}).items():
        earlier = (before.get("by_stratum") or {}).get(stratum, {})
        table.add_row(
            f"{stratum}: accuracy",
            *_format_change_cells(earlier.get("accuracy"), figures["accuracy"]),
        )
        if "auroc" in figures:
            table.add_row(
                f"{stratum}: AUROC", *_format_change_cells(earlier.get("auroc"), figures["auroc"])
            )
    _add_suite_rows(registry, run, table)
    if "environment" in after:
        _add_environment_rows(before, after, table)
    console.print(table)
    if after.get("brier") is not None:
        from rlx.evaluation import Calibration, render_reliability_text

        measured = Calibration.from_json(after)
        console.print(render_reliability_text(measured, width=min(80, max(60, console.width))))
    _show_run_probes(registry, run, console)
    events = registry.results.events(run.id)
    for warning in dict.fromkeys(e.message for e in events if e.level == "warning"):
        console.print(f"! {escape_unprintable(warning)}", style="yellow")
    if (idle := registry.queries.count_idle_steps(run.id)) >= IDLE_STEPS:
        console.print(f"! no gradient in the last {idle} steps", style="yellow")
    used = [e.payload or {} for e in events if e.kind == "resources"]
    if curve := registry.results.metrics(run.id, [WARM_START_LOSS]).get(WARM_START_LOSS):
        (_, first), (steps, last) = curve[0], curve[-1]
        console.print(f"warm      {steps} steps of warm start, loss {first:.3f} → {last:.3f}")
    run = registry.run(run.id)  # MLflow may have it only since its supervisor has ended
    _show_run_locations(run, sum(float(u["cpu_seconds"]) for u in used) if used else None, console)


def _add_suite_rows(registry: Registry, run: RunRecord, table: Table) -> None:
    """Adds the accuracy on the other held-out sets, and with greedy decoding."""
    suites: dict[str, dict[str, float]] = {}
    for e in registry.queries.evaluation_figures(run.id):
        if e.suite != "held_out" and not e.suite.startswith("probe/"):
            suites.setdefault(e.suite, {})[e.label] = e.metrics["accuracy"]
    for suite, accuracy in suites.items():
        name, _, how = suite.removeprefix("held_out").partition(".")
        label = " ".join(part for part in (name, how) if part)
        table.add_row(
            f"{label}: accuracy",
            *_format_change_cells(accuracy.get("before"), accuracy.get("after")),
            "",
        )


def _add_environment_rows(
    before: Mapping[str, Any], after: Mapping[str, Any], table: Table
) -> None:
    """Adds rewards and environment figures, without the shares of single words."""
    for section in ("rewards", "environment"):
        earlier, later = before.get(section) or {}, after[section]
        table.add_section()
        for name in later:
            if name.count("/") < 2:
                label = name.removeprefix("info/").replace("_", " ").strip()
                table.add_row(label, *_format_change_cells(earlier.get(name), later[name]), "")


def _show_run_probes(registry: Registry, run: RunRecord, console: Console) -> None:
    suites = {e.suite for e in registry.queries.evaluation_figures(run.id)}
    if any(suite.startswith("probe/") for suite in suites):
        from rlx.cli.probe_tables import show_probes
        from rlx.record import recorded_probes

        show_probes(recorded_probes(registry, run.id), console)


def _describe_sample_size(record: EvaluationRecord | None) -> str:
    """Describes the number of answers and of distinct problems: a task may repeat problems."""
    if record is None:
        return ""
    different = len(set((record.payload or {}).get("problem_ids", ()))) or record.n
    if different == record.n:
        return f": {record.n} held-out problems"
    return f": {record.n} answers to {different} held-out problems"


def _format_change_cells(before: float | None, after: float | None) -> tuple[str, str, str]:
    def format_cell_number(value: Any, sign: str = "") -> str:
        if value is None:
            return "–"
        return f"{value:{sign}d}" if isinstance(value, int) else f"{value:{sign}.3f}"

    change = None if before is None or after is None else after - before
    return format_cell_number(before), format_cell_number(after), format_cell_number(change, "+")


def _show_run_locations(run: RunRecord, cpu_seconds: float | None, console: Console) -> None:
    root = locate_run_folder(run).root
    seconds = (run.ended or 0) - (run.started or 0)
    used = "" if cpu_seconds is None else f", {cpu_seconds:.0f} CPU-s"
    lines = [
        f"took      {seconds:.0f} s{used}",
        f"files     {os.path.relpath(root)}/   model/ rollouts/ spec.yaml run.log",
        f"look      rlx samples {run.id}   ·   rlx status {run.id}   ·   rlx web",
        f"plots     rlx pictures {run.id}",
    ]
    if mlflow := describe_mlflow_page([run], [run.id]):
        lines.append(f"mlflow    {mlflow}   (curves, compare view)")
    console.print("\n".join(lines))
