"""Tables of results: the summary of a run, an evaluated suite, probes."""

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlx.cli.console import build_table, open_console
from rlx.launch import locate_run_folder
from rlx.record import find_mlflow_link
from rlx.text import escape_unprintable
from rlx_registry import EvaluationRecord, Registry, RunRecord, is_idle

if TYPE_CHECKING:  # slow to import, and few runs have probes
    from rlx.probe import RecordedProbe
    from rlx.spec import SuiteSpec

WARM_START_LOSS = "warm_start/loss"
CPU_PARTS = ("sample", "score", "learn", "record", "evaluate", "rest")
"""Parts of a run's work, as the names of its metrics have them."""
SUMMARY_ROWS = (
    ("accuracy", "accuracy", "higher is better"),
    ("brier", "Brier score", "lower is better"),
    ("brier_recalibrated", "  recalibrated out of fold", "near Brier: calibrated"),
    ("base_rate_brier", "  of a constant, the accuracy", "what Brier must beat"),
    ("stratum_brier", "  knowing only the stratum", "what Brier must beat"),
    ("auroc", "AUROC", "higher is better"),
    ("auroc_one_bit", "  of at least .5, yes or no", "below AUROC: more than one bit"),
    ("stratum_auroc", "  knowing only the stratum", "what AUROC must beat"),
    ("within_auroc", "  among problems of one kind", "above 0.5: it knows more than the kind"),
    ("ece", "ECE, 10 bins", "lower is better"),
    ("ece_debiased", "  without small-sample bias", "lower is better"),
    ("mean_confidence", "mean confidence", "near accuracy"),
    ("alike_share", "all confidences alike", "1 is a frozen policy"),
    (
        "unparsable",
        "unparsable confidences",
        "count as the worst; no figures if under 10 % can be read",
    ),
)


def show_run_summary(registry: Registry, run: RunRecord, console: Console) -> None:
    """Prints held-out metrics before training, at the ends of phases and after it, the reliability
    diagram, and paths."""
    records = _select_compared_evaluations(run, registry.results.evaluations(run.id, "held_out"))
    evaluations = {column: record.metrics for column, record in records.items()}
    after = evaluations.get("after", {})
    sample_size = _describe_sample_size(records.get("after"))
    title = f"{escape_unprintable(run.name)} {run.id}, seed {run.seed}{sample_size}"
    console.print(title, style="bold")
    heads = ["before", *(c for c in evaluations if c not in ("before", "after")), "after"]
    columns = [_add_base_rate(evaluations.get(head, {})) for head in heads]
    names = (escape_unprintable(head) for head in heads)
    table = build_table("", *names, "change", Column(""), padding=(0, 2, 0, 0))
    for name, label, meaning in SUMMARY_ROWS:
        if columns[-1].get(name) is not None:
            cells = _format_change_cells([found.get(name) for found in columns])
            table.add_row(label, *cells, meaning)
    strata = [found.get("by_stratum") or {} for found in columns]
    for stratum, figures in strata[-1].items():
        for name, label in (("accuracy", "accuracy"), ("auroc", "AUROC")):
            if name == "accuracy" or name in figures:
                values = [found.get(stratum, {}).get(name) for found in strata]
                table.add_row(f"{stratum}: {label}", *_format_change_cells(values))
    _add_suite_rows(registry, run, heads, table)
    if "environment" in after:
        _add_environment_rows(columns, table)
    console.print(table)
    if after.get("brier") is not None:
        from rlx.evaluation import render_reliability_text

        console.print(render_reliability_text(after, width=min(80, max(60, console.width))))
    _show_run_probes(registry, run, console)
    events = registry.results.events(run.id)
    for warning in dict.fromkeys(e.message for e in events if e.level == "warning"):
        console.print(f"! {escape_unprintable(warning)}", style="yellow")
    if is_idle(idle := registry.queries.idle_steps([run.id])[run.id], run.step):
        console.print(f"! no gradient in the last {idle} of {run.step} steps", style="yellow")
    used = [e.payload or {} for e in events if e.kind == "resources"]
    if curve := registry.results.metrics(run.id, [WARM_START_LOSS]).get(WARM_START_LOSS):
        (_, first), (steps, last) = curve[0], curve[-1]
        console.print(f"warm      {steps} steps of warm start, loss {first:.3f} → {last:.3f}")
    run = registry.run(run.id)  # MLflow may have it only since its supervisor has ended
    total = sum(float(u["cpu_seconds"]) for u in used) if used else None
    parts = sum_cpu_seconds(registry, run.id)
    if total is not None and parts and (run.spec.get("runner") or {}).get("ranks") == 1:
        parts["start"] = max(total - sum(parts.values()), 0.0)
    _show_run_locations(run, total, parts, console)


def _add_base_rate(figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the Brier score of a constant confidence that equals the accuracy, where there are
    confidences."""
    if figures.get("brier") is None:
        return figures
    accuracy = float(figures["accuracy"])
    return {**figures, "base_rate_brier": accuracy * (1 - accuracy)}


def _select_compared_evaluations(
    run: RunRecord, found: Sequence[EvaluationRecord]
) -> dict[str, EvaluationRecord]:
    """The evaluations that the summary compares, by column: before training, at the end of each
    phase but the last, where there was one, by the phase's name, and after training."""
    ends, done = dict[int, str](), 0
    for phase in run.spec.get("phases") or ():
        done += phase["steps"]
        ends[done] = phase["name"]
    columns: dict[str, EvaluationRecord] = {}
    for record in found:
        if record.label != "step":
            columns[record.label] = record
        elif record.step in ends:
            columns[f"after {ends[record.step]}"] = record
    return columns


def sum_cpu_seconds(registry: Registry, run_id: str) -> dict[str, float]:
    """CPU seconds of a run's first rank by part of its work: all steps and evaluations together.
    Empty for runs of earlier versions."""
    names = {f"perf/cpu_{part}_s": part for part in CPU_PARTS}
    curves = registry.results.metrics(run_id, list(names))
    return {
        part: sum(value for _, value in curves[name])
        for name, part in names.items()
        if curves.get(name)
    }


def _add_suite_rows(
    registry: Registry, run: RunRecord, columns: Sequence[str], table: Table
) -> None:
    """Adds the accuracy on the other held-out sets, and with greedy decoding."""
    found = registry.results.evaluations(run.id, with_payload=False)
    for suite in dict.fromkeys(e.suite for e in found):
        if suite == "held_out" or suite.startswith("probe/"):
            continue
        own = _select_compared_evaluations(run, [e for e in found if e.suite == suite])
        accuracy = [own[c].metrics["accuracy"] if c in own else None for c in columns]
        name, _, how = suite.removeprefix("held_out").partition(".")
        label = " ".join(part for part in (name, how) if part)
        table.add_row(f"{label}: accuracy", *_format_change_cells(accuracy), "")


def _add_environment_rows(columns: Sequence[Mapping[str, Any]], table: Table) -> None:
    """Adds rewards and environment figures, without the shares of single words."""
    for section in ("rewards", "environment"):
        sections = [found.get(section) or {} for found in columns]
        table.add_section()
        for name in sections[-1]:
            if name.count("/") < 2:
                label = name.removeprefix("info/").replace("_", " ").strip()
                cells = _format_change_cells([found.get(name) for found in sections])
                table.add_row(label, *cells, "")


def _show_run_probes(registry: Registry, run: RunRecord, console: Console) -> None:
    suites = {e.suite for e in registry.results.evaluations(run.id, with_payload=False)}
    if any(suite.startswith("probe/") for suite in suites):
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


def _format_change_cells(values: Sequence[float | None]) -> tuple[str, ...]:
    """Formats figures, the first before and the last after training, and their difference."""

    def format_cell_number(value: Any, sign: str = "") -> str:
        if value is None:
            return "–"
        return f"{value:{sign}d}" if isinstance(value, int) else f"{value:{sign}.3f}"

    before, after = values[0], values[-1]
    change = None if before is None or after is None else after - before
    return (*map(format_cell_number, values), format_cell_number(change, "+"))


def _show_run_locations(
    run: RunRecord, cpu_seconds: float | None, parts: Mapping[str, float], console: Console
) -> None:
    from rlx.record import list_tracker_pages

    root = locate_run_folder(run).root
    seconds = (run.ended or 0) - (run.started or 0)
    used = "" if cpu_seconds is None else f", {cpu_seconds:.0f} CPU-s"
    lines = [f"took      {seconds:.0f} s{used}"]
    if parts:
        shares = [f"{part} {value:.1f}" for part, value in parts.items()]
        lines.append(f"CPU-s     {', '.join(shares)}")
    lines += [
        f"files     {os.path.relpath(root)}/   model/ rollouts/ spec.yaml run.log",
        f"look      rlx samples {run.id}   ·   rlx status {run.id}   ·   rlx web",
        f"plots     rlx status {run.id} --pictures",
    ]
    if mlflow := describe_mlflow_page([run], [run.id]):
        lines.append(f"mlflow    {mlflow}   (curves, compare view)")
    for kind, page in list_tracker_pages(run).items():
        lines.append(escape_unprintable(f"{kind:<9} {page}"))
    console.print("\n".join(lines))


def describe_mlflow_page(runs: Sequence[RunRecord], names: Sequence[str]) -> str | None:
    """Returns the address that shows runs on their MLflow server, or the command that serves it.

    Args:
        runs: as they are now in the registry.
        names: names for the runs that the command takes.

    Returns:
        None if MLflow has none of the runs.
    """
    link = find_mlflow_link(runs)
    if link is None:
        return None
    return shlex.join(["rlx", "web", "--mlflow", *names]) if link.store else link.url


SUITE_ROWS = (
    ("accuracy", "accuracy"),
    ("mean confidence", "mean_confidence"),
    ("signed gap", "signed_gap"),
    ("Brier", "brier"),
    ("Brier, recalibrated", "brier_recalibrated"),
    ("Brier of the stratum alone", "stratum_brier"),
    ("Brier skill", "brier_skill"),
    ("NLL (clipped)", "nll"),
    ("ECE, 10 bins", "ece"),
    ("ECE, debiased", "ece_debiased"),
    ("ECE, equal mass", "ece_mass"),
    ("MCE", "mce"),
    ("AUROC", "auroc"),
    ("AUROC of at least .5", "auroc_one_bit"),
    ("AUROC of the stratum alone", "stratum_auroc"),
    ("AUROC within strata", "within_auroc"),
    ("AURC", "aurc"),
    ("accuracy at 50 % coverage", "accuracy_at.0.5"),
    ("accuracy at 80 % coverage", "accuracy_at.0.8"),
    ("accuracy at 90 % coverage", "accuracy_at.0.9"),
    ("readable confidences", "readable_share"),
    ("siblings all alike", "alike_share"),
    ("cut short", "truncated"),
)
"""Label and figure of each table row."""


COLUMN_PADDING = (0, 2, 0, 0)


def get_suite_figure(figures: Mapping[str, Any], name: str) -> float | None:
    """Returns a figure by its path, such as `accuracy_at.0.5`; None if absent."""
    first, _, rest = name.partition(".")
    found = figures.get(first)
    if rest:
        found = (found or {}).get(rest)
    return found


def get_figure_interval(figures: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Returns the 95 % interval of a figure over problems; None if absent."""
    found = (figures.get("intervals") or {}).get(name)
    return None if found is None else (found[0], found[1])


def show_suite(suite: "SuiteSpec", figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a table of all sets, and one of votes if several answers were sampled."""
    console = open_console()
    how = "the most likely tokens" if suite.greedy else "sampled"
    answers = "one answer" if suite.samples == 1 else f"{suite.samples} answers"
    console.print(
        f"suite {escape_unprintable(suite.name)}, seed {suite.seed}: {answers} to every "
        f"problem, {how}; "
        "± to the farther end of the 95 % interval over problems",
        style="bold",
    )
    heads = (f"{escape_unprintable(name)}\n{f['distribution']}" for name, f in figures.items())
    table = build_table(Column("", no_wrap=True), *heads, padding=COLUMN_PADDING)
    for label, name in (("problems", "problems"), ("answers", "n")):
        table.add_row(label, *(str(found[name]) for found in figures.values()))
    for label, place in SUITE_ROWS:
        if any(get_suite_figure(found, place) is not None for found in figures.values()):
            table.add_row(label, *(_format_figure_cell(found, place) for found in figures.values()))
    console.print(table)
    scaled = {name: f["scaling"] for name, f in figures.items() if f["scaling"]}
    if scaled:
        console.print(_build_vote_table(scaled))


def _format_figure_cell(figures: Mapping[str, Any], place: str) -> str:
    value, interval = get_suite_figure(figures, place), get_figure_interval(figures, place)
    if value is None:
        return "–"
    if interval is None:
        return f"{value:.3f}"
    return f"{value:.3f} ±{max(value - interval[0], interval[1] - value):.3f}"


def _build_vote_table(scaled: Mapping[str, Mapping[str, Any]]) -> Table:
    heads = ("k", "pass@k", "majority", "by confidence", "most confident", "vote ECE")
    table = build_table(Column("", no_wrap=True), *heads, padding=COLUMN_PADDING)
    rules = ("pass_at", "majority", "weighted", "most_confident", "vote_share_ece")
    for name, scaling in scaled.items():
        for i, k in enumerate(scaling["k"]):
            cells = ["–" if scaling[r] is None else f"{scaling[r][i]:.3f}" for r in rules]
            table.add_row("" if i else escape_unprintable(name), str(k), *cells)
    return table


PROBE_SHARES = (0.0, 0.5, 1.0)
"""Shares of the reasoning at which the table shows `mc_p_correct`."""


def show_probes(probes: "Sequence[RecordedProbe]", console: Console) -> None:
    """Prints the probes of one run or model: a table per suite, and a line on stated confidence.

    Args:
        probes: ordered by step; the line is about the last one with stated confidences.
        console: the console to print to.
    """
    from rlx.probe import agreement_line, compute_agreement

    suites: dict[str, list[RecordedProbe]] = {}
    for probe in probes:
        suites.setdefault(probe.suite, []).append(probe)
    for steps in suites.values():
        console.print(_build_probe_steps_table(steps))
        console.print()
    for probe in reversed(probes):
        found = compute_agreement(probe.verbal)
        if found is not None:
            console.print(f"step {probe.step}: {agreement_line(found)}", soft_wrap=True)
            break


def _build_probe_steps_table(steps: "Sequence[RecordedProbe]") -> Table:
    from rlx.probe import GRID

    suite, settings = (
        escape_unprintable(steps[-1].suite),
        _describe_probe_settings(steps[-1].figures["settings"]),
    )
    title = f"probe {suite}: mc_p_correct by share of reasoning\n{settings}"
    heads = [f"\nat {share:g}" for share in PROBE_SHARES]
    headings = ("\nstep", *heads, "area over\nsame", "whole\nright", "\nwrapped", "\nproblems")
    table = build_table(*headings, title=title)
    table.columns[0].justify = "right"
    places = [GRID.index(share) for share in PROBE_SHARES]
    for probe in steps:
        figures = probe.figures
        table.add_row(
            str(probe.step),
            *(_format_band_cell(figures["p_correct"][place]) for place in places),
            _format_band_cell(figures["aoc"]),
            f"{figures['accuracy']:.3f}",
            f"{figures['wrapped']:.3f}",
            str(figures["problems"]),
        )
    return table


def _format_band_cell(band: Mapping[str, Any]) -> Text:
    """Formats a mean with its interval below."""
    if band["mean"] is None:
        return Text("–")
    interval = f"{band['low']:.2f}–{band['high']:.2f}"
    return Text.assemble(f"{band['mean']:.3f}\n", (interval, "dim"))


def _describe_probe_settings(settings: Any) -> str:
    cut = settings["cut"]["by"]
    return f"{settings['samples']} samples a point, cut by {cut}, seed {settings['seed']}"
