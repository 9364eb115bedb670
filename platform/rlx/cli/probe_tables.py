"""Prints probes: a table per suite with a row per step, and stated against sampled confidence."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlx.cli.console import build_table
from rlx.probe import GRID, MeanInterval, RecordedProbe, agreement_line, compute_agreement
from rlx.text import escape_unprintable

__all__ = ["show_probes"]

SHARES = (0.0, 0.5, 1.0)
"""Shares of the reasoning at which the table shows `mc_p_correct`."""


def show_probes(probes: Sequence[RecordedProbe], console: Console) -> None:
    """Prints the probes of one run or model: a table per suite, and a line on stated confidence.

    Args:
        probes: ordered by step; the line is about the last one with stated confidences.
        console: the console to print to.
    """
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


def _build_probe_steps_table(steps: Sequence[RecordedProbe]) -> Table:
    suite, settings = (
        escape_unprintable(steps[-1].suite),
        _describe_probe_settings(steps[-1].settings),
    )
    title = f"probe {suite}: mc_p_correct by share of reasoning\n{settings}"
    heads = [f"\nat {share:g}" for share in SHARES]
    headings = ("\nstep", *heads, "area over\nsame", "whole\nright", "\nwrapped", "\nproblems")
    table = build_table(*headings, title=title)
    table.columns[0].justify = "right"
    places = [GRID.index(share) for share in SHARES]
    for probe in steps:
        figures = probe.figures
        left_out = f"\n{probe.unprobed} left out" if probe.unprobed else ""
        table.add_row(
            str(probe.step),
            *(_format_band_cell(figures.p_correct[place]) for place in places),
            _format_band_cell(figures.aoc),
            f"{figures.accuracy:.3f}",
            f"{figures.wrapped:.3f}",
            f"{figures.problems}{left_out}",
        )
    return table


def _format_band_cell(band: MeanInterval) -> Text:
    """Formats a mean with its interval below."""
    if math.isnan(band.mean):
        return Text("–")
    return Text.assemble(f"{band.mean:.3f}\n", (f"{band.low:.2f}–{band.high:.2f}", "dim"))


def _describe_probe_settings(settings: Any) -> str:
    cut = settings["cut"]["by"]
    return f"{settings['samples']} samples a point, cut by {cut}, seed {settings['seed']}"
