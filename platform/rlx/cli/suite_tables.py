"""Prints the figures of an evaluated suite, one column per set."""

from collections.abc import Mapping
from typing import Any

from rich.table import Column, Table

from rlx.cli.console import build_table, open_console
from rlx.spec import SuiteSpec
from rlx.text import escape_unprintable

__all__ = ["ROWS", "get_figure_interval", "get_suite_figure", "show_suite"]

ROWS = (
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
    ("ECE, 15 bins", "ece_15"),
    ("ECE, equal mass", "ece_mass"),
    ("MCE", "mce"),
    ("AUROC", "auroc"),
    ("AUROC of at least .5", "auroc_one_bit"),
    ("AUROC of the stratum alone", "stratum_auroc"),
    ("AUROC within strata", "within_auroc"),
    ("AUPRC of errors", "auprc_error"),
    ("AURC", "aurc"),
    ("E-AURC", "e_aurc"),
    ("accuracy at 50 % coverage", "accuracy_at.0.5"),
    ("accuracy at 80 % coverage", "accuracy_at.0.8"),
    ("accuracy at 90 % coverage", "accuracy_at.0.9"),
    ("coverage at 5 % risk", "coverage_at.0.05"),
    ("coverage at 10 % risk", "coverage_at.0.1"),
    ("readable confidences", "readable_share"),
    ("distinct confidences", "distinct_share"),
    ("within .01 of 0 or 1", "extreme_share"),
    ("siblings all alike", "alike_share"),
    ("cut short", "truncated"),
)
"""Label and figure of each table row."""


PADDING = (0, 2, 0, 0)


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


def show_suite(suite: SuiteSpec, figures: Mapping[str, Mapping[str, Any]]) -> None:
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
    table = build_table(Column("", no_wrap=True), *heads, padding=PADDING)
    for label, name in (("problems", "problems"), ("answers", "n")):
        table.add_row(label, *(str(found[name]) for found in figures.values()))
    for label, place in ROWS:
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
    table = build_table(Column("", no_wrap=True), *heads, padding=PADDING)
    rules = ("pass_at", "majority", "weighted", "most_confident", "vote_share_ece")
    for name, scaling in scaled.items():
        for i, k in enumerate(scaling["k"]):
            cells = ["–" if scaling[r] is None else f"{scaling[r][i]:.3f}" for r in rules]
            table.add_row("" if i else escape_unprintable(name), str(k), *cells)
    return table
