"""The summary of a run: its held-out figures, evaluated suites, probes and paths."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Column
from rich.text import Text

from rlx.cli.console import open_console
from rlx.cli.tables import build_table
from rlx.launch import locate_run_folder
from rlx.record import find_mlflow_link
from rlx.text import escape_unprintable
from rlx_registry import FIGURES, EvaluationRecord, Registry, RunRecord, is_idle

if TYPE_CHECKING:  # slow to import, and few runs have probes
    from rlx.probe import RecordedProbe
    from rlx.spec import SuiteSpec

WARM_START_LOSS = "warm_start/loss"
CPU_METRICS = {
    f"perf/cpu_{part}_s": part
    for part in ("sample", "score", "learn", "record", "evaluate", "rest")
}


def show_run_summary(registry: Registry, run: RunRecord) -> None:
    """Prints held-out metrics before training, at the ends of phases and after it, and paths."""
    console = open_console()
    records = _select_compared_evaluations(run, registry.results.evaluations(run.id, "held_out"))
    evaluations = {column: record.metrics for column, record in records.items()}
    after = evaluations.get("after", {})
    sample_size = _describe_sample_size(records.get("after"))
    title = f"{escape_unprintable(run.name)} {run.id}, seed {run.seed}{sample_size}"
    console.print(title, style="bold")
    heads = ["before", *(c for c in evaluations if c not in ("before", "after")), "after"]
    columns = [dict(evaluations.get(head, {})) for head in heads]
    for figures in columns:  # of a constant confidence that equals the accuracy
        if figures.get("brier") is not None:
            figures["base_rate_brier"] = figures["accuracy"] * (1 - figures["accuracy"])
    names = (escape_unprintable(head) for head in heads)
    table = build_table("", *names, "change", Column(""))
    for name, title, meaning in FIGURES:
        if meaning and columns[-1].get(name) is not None:
            cells = _format_change_cells([found.get(name) for found in columns])
            table.add_row(title, *cells, meaning)
    strata = [found.get("by_stratum") or {} for found in columns]
    for stratum, figures in strata[-1].items():
        for name, title in (("accuracy", "accuracy"), ("auroc", "AUROC")):
            if name == "accuracy" or name in figures:
                values = [found.get(stratum, {}).get(name) for found in strata]
                table.add_row(f"{stratum}: {title}", *_format_change_cells(values))
    suites: dict[str, list[EvaluationRecord]] = {}
    for one in registry.results.evaluations(run.id, with_payload=False):
        suites.setdefault(one.suite, []).append(one)
    for suite, found in suites.items():  # the other held-out sets, and greedy decoding
        if suite != "held_out" and not suite.startswith("probe/"):
            own = _select_compared_evaluations(run, found)
            accuracy = [own[head].metrics["accuracy"] if head in own else None for head in heads]
            label = " ".join(filter(None, suite.removeprefix("held_out").split(".", 1)))
            table.add_row(f"{label}: accuracy", *_format_change_cells(accuracy), "")
    for section in ("rewards", "environment") if "environment" in after else ():
        sections = [found.get(section) or {} for found in columns]
        table.add_section()
        for name in sections[-1]:
            if name.count("/") < 2:  # without the shares of single words
                label = name.removeprefix("info/").replace("_", " ").strip()
                cells = _format_change_cells([found.get(name) for found in sections])
                table.add_row(label, *cells, "")
    console.print(table)
    if any(suite.startswith("probe/") for suite in suites):
        from rlx.record import recorded_probes

        show_probes(recorded_probes(registry, run.id))
    events = registry.results.events(run.id)
    for warning in dict.fromkeys(e.message for e in events if e.level == "warning"):
        console.print(f"! {escape_unprintable(warning)}", style="yellow")
    if is_idle(idle := registry.queries.idle_steps([run.id])[run.id], run.step):
        console.print(f"! no gradient in the last {idle} of {run.step} steps", style="yellow")
    if curve := registry.results.metrics(run.id, [WARM_START_LOSS]).get(WARM_START_LOSS):
        (_, first), (steps, last) = curve[0], curve[-1]
        console.print(f"warm      {steps} steps of warm start, loss {first:.3f} → {last:.3f}")
    run = registry.run(run.id)  # MLflow may have it only since its supervisor has ended
    used = [float((e.payload or {})["cpu_seconds"]) for e in events if e.kind == "resources"]
    curves = registry.results.metrics(run.id, list(CPU_METRICS))
    parts = {
        part: sum(value for _, value in curves[name])
        for name, part in CPU_METRICS.items()
        if curves.get(name)
    }
    console.print("\n".join(_list_run_locations(run, used, parts)))


def _select_compared_evaluations(
    run: RunRecord, found: Sequence[EvaluationRecord]
) -> dict[str, EvaluationRecord]:
    """The evaluations that the summary compares, by column: before training, at the end of each
    phase but the last, by the phase's name, and after training."""
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


def _describe_sample_size(record: EvaluationRecord | None) -> str:
    if record is None:
        return ""
    different = len(set((record.payload or {}).get("problem_ids", ()))) or record.n
    if different == record.n:
        return f": {record.n} held-out problems"
    return f": {record.n} answers to {different} held-out problems"


def _format_change_cells(values: Sequence[float | None]) -> tuple[str, ...]:
    """Figures, the first before and the last after training, and their difference."""

    def format_cell_number(value: Any, sign: str = "") -> str:
        if value is None:
            return "–"
        return f"{value:{sign}d}" if isinstance(value, int) else f"{value:{sign}.3f}"

    before, after = values[0], values[-1]
    change = None if before is None or after is None else after - before
    return (*map(format_cell_number, values), format_cell_number(change, "+"))


def _list_run_locations(
    run: RunRecord, used: Sequence[float], parts: dict[str, float]
) -> Iterator[str]:
    """What a run took, by the CPU seconds of each attempt and of the first rank by part of its
    work, and where its files and pages are."""
    seconds = (run.ended or 0) - (run.started or 0)
    yield f"took      {seconds:.0f} s" + (f", {sum(used):.0f} CPU-s" if used else "")
    if used and parts and (run.spec.get("runner") or {}).get("ranks") == 1:
        parts |= {"start": max(sum(used) - sum(parts.values()), 0.0)}
    if parts:
        yield f"CPU-s     {', '.join(f'{part} {value:.1f}' for part, value in parts.items())}"
    root = os.path.relpath(locate_run_folder(run).root)
    yield f"files     {root}/   model/ rollouts/ spec.yaml run.log"
    yield f"look      rlx samples {run.id}   ·   rlx status {run.id}   ·   rlx web"
    yield f"plots     rlx status {run.id} --pictures"
    if mlflow := describe_mlflow_page([run], [run.id]):
        yield f"mlflow    {mlflow}   (curves, compare view)"
    if (run.spec.get("tracking") or {}).get("trackers"):
        from rlx.record import list_tracker_pages  # brings pydantic, and few runs have others

        for kind, page in list_tracker_pages(run).items():
            yield escape_unprintable(f"{kind:<9} {page}")


def describe_mlflow_page(runs: Sequence[RunRecord], names: Sequence[str]) -> str | None:
    """The address that shows runs on their MLflow server, or the command, with `names` of the runs,
    that serves it; None if MLflow has none of them."""
    link = find_mlflow_link(runs)
    if link is None:
        return None
    return shlex.join(["rlx", "web", "--mlflow", *names]) if link.store else link.url


def _get_suite_figure(figures: Mapping[str, Any], name: str) -> float | None:
    first, _, rest = name.partition(".")
    found = figures.get(first)
    return (found or {}).get(rest) if rest else found


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
    table = build_table(Column("", no_wrap=True), *heads)
    for title, name in (("problems", "problems"), ("answers", "n")):
        table.add_row(title, *(str(found[name]) for found in figures.values()))
    for name, title, _ in FIGURES:
        if any(_get_suite_figure(found, name) is not None for found in figures.values()):
            table.add_row(title, *(_format_figure_cell(found, name) for found in figures.values()))
    console.print(table)
    scaled = {name: f["scaling"] for name, f in figures.items() if f["scaling"]}
    if not scaled:
        return
    rules = ("pass_at", "majority", "weighted", "most_confident", "vote_share_ece")
    named = ("k", "pass@k", "majority", "by confidence", "most confident", "vote ECE")
    votes = build_table(Column("", no_wrap=True), *named)
    for name, scaling in scaled.items():
        for i, k in enumerate(scaling["k"]):
            cells = ["–" if scaling[r] is None else f"{scaling[r][i]:.3f}" for r in rules]
            votes.add_row("" if i else escape_unprintable(name), str(k), *cells)
    console.print(votes)


def _format_figure_cell(figures: Mapping[str, Any], name: str) -> str:
    value, interval = _get_suite_figure(figures, name), (figures.get("intervals") or {}).get(name)
    if value is None:
        return "–"
    if interval is None:
        return f"{value:.3f}"
    return f"{value:.3f} ±{max(value - interval[0], interval[1] - value):.3f}"


PROBE_SHARES = (0.0, 0.5, 1.0)
"""Shares of the reasoning at which the table shows `mc_p_correct`."""


def show_probes(probes: "Sequence[RecordedProbe]") -> None:
    """Prints probes, ordered by step: a table per suite, and a line on stated confidence, of the
    last one that has it."""
    from rlx.probe import GRID, agreement_line, compute_agreement

    console = open_console()
    suites: dict[str, list[RecordedProbe]] = {}
    for probe in probes:
        suites.setdefault(probe.suite, []).append(probe)
    for steps in suites.values():
        settings = steps[-1].figures["settings"]
        title = (
            f"probe {escape_unprintable(steps[-1].suite)}: mc_p_correct by share of reasoning\n"
            f"{settings['samples']} samples a point, cut by {settings['cut']['by']}, "
            f"seed {settings['seed']}"
        )
        heads = [f"\nat {share:g}" for share in PROBE_SHARES]
        headings = ("\nstep", *heads, "area over\nsame", "whole\nright", "\nwrapped", "\nproblems")
        table = build_table(*headings, title=title)
        table.columns[0].justify = "right"
        for probe in steps:
            figures = probe.figures
            points = [figures["p_correct"][GRID.index(share)] for share in PROBE_SHARES]
            table.add_row(
                str(probe.step),
                *map(_format_band_cell, [*points, figures["aoc"]]),
                f"{figures['accuracy']:.3f}",
                f"{figures['wrapped']:.3f}",
                str(figures["problems"]),
            )
        console.print(table)
        console.print()
    for probe in reversed(probes):
        found = compute_agreement(probe.verbal)
        if found is not None:
            console.print(f"step {probe.step}: {agreement_line(found)}", soft_wrap=True)
            break


def _format_band_cell(band: Mapping[str, Any]) -> Text:
    if band["mean"] is None:
        return Text("–")
    interval = f"{band['low']:.2f}–{band['high']:.2f}"
    return Text.assemble(f"{band['mean']:.3f}\n", (interval, "dim"))
