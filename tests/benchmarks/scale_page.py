"""The tables of a large step in docs/scale.md, from what its ranks measured."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from harness import fit_slope
from page import machine
from scale_parts import PARTS
from shapes import Shape

__all__ = ["PAGE", "build_tables", "write_tables"]

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
BEGIN, END = "<!-- step -->", "<!-- /step -->"
RATED = ("scoring", "Parquet file", "SQLite", "PostgreSQL")
"""Parts whose rate is told."""
NOISE = {"clock": 0.05, "cpu": 0.05, "peak": 4.0}
"""Costs below these say nothing of growth."""

Found = Mapping[str, Any]


def build_tables(
    shape: Shape,
    tokens: int,
    alone: Mapping[int, Found],
    among: Mapping[int, Sequence[Found]],
) -> str:
    """Two tables, a list of rates and sizes, and where they were made.

    Args:
        shape: of the largest step.
        tokens: of a rollout.
        alone: by the number of rollouts, what the only rank measured.
        among: by the number of ranks, what each of them measured of the largest step.
    """
    return "\n\n".join(
        [
            _describe_step(shape, tokens, alone[max(alone)]),
            _build_growth_table(alone),
            _list_rates(alone),
            _build_rank_table(among),
            f"Measured on {machine()}, {date.today().isoformat()}.",
        ]
    )


def write_tables(path: Path, tables: str) -> None:
    """Puts the tables between the marks of a page, or writes a page of nothing else."""
    text = path.read_text() if path.exists() else f"{BEGIN}{END}\n"
    before, _, rest = text.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}")


def _describe_step(shape: Shape, tokens: int, found: Found) -> str:
    sizes = found["sizes"]
    return (
        f"{shape.prompts:,} prompts, {shape.answers} answers to each and {shape.confidences} "
        f"confidences in each: {shape.prompts * shape.answers * shape.confidences:,} rollouts of "
        f"{tokens:,} tokens, {sizes['rows']:,} rows, {sizes['tokens'] / 1e6:.1f} million tokens "
        f"in trees. The file has {sizes['body']:.0f} MB, "
        f"{1e6 * sizes['body'] / sizes['tokens']:.0f} bytes per token; the journal has "
        f"{1e3 * sizes['journal']:.1f} KB."
    )


def _build_growth_table(alone: Mapping[int, Found]) -> str:
    """Costs of the largest step on one rank, and how they grew up to it."""
    largest = max(alone)
    lines = [
        "| part | clock, s | CPU, s | slope | peak, MiB | slope | kept, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for part in _list_parts(alone[largest]):
        cost = alone[largest]["costs"][part]
        cells = [part, _show(cost["clock"]), _show(cost["cpu"]), _show_slope(alone, part, "cpu")]
        cells += [f"{cost['peak']:.0f}", _show_slope(alone, part, "peak"), f"{cost['kept']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _list_parts(found: Found) -> list[str]:
    return [part for part in PARTS if part in found["costs"]]


def _show_slope(alone: Mapping[int, Found], part: str, kind: str) -> str:
    """The slope over those sizes whose cost is more than noise; "" where they are too few."""
    costs = {n: found["costs"][part][kind] for n, found in alone.items()}
    known = {n: cost for n, cost in costs.items() if cost >= NOISE[kind]}
    return f"{fit_slope(list(known), list(known.values())):.2f}" if len(known) > 1 else ""


def _list_rates(alone: Mapping[int, Found]) -> str:
    """Rollouts per second, by the clock, that each place takes in the largest step."""
    largest = max(alone)
    costs = alone[largest]["costs"]
    rates = [f"{part} {largest / costs[part]['clock']:,.0f}" for part in RATED if part in costs]
    return f"Rollouts per second, by the clock: {', '.join(rates)}."


def _build_rank_table(among: Mapping[int, Sequence[Found]]) -> str:
    """What the busiest rank spends on each part, by the number of ranks."""
    counts, parts = sorted(among), _list_parts(among[min(among)][0])
    titles = [f"{kind}, {_name_ranks(n)}" for kind in ("CPU s", "MiB") for n in counts]
    head = ["part", "who, of what", *titles]
    if len(counts) > 1:
        head.append(f"CPU at {counts[-1]} ÷ at {counts[0]}")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for part in parts:
        most = {
            kind: [
                max(found["costs"][part][kind] for found in among[n] if part in found["costs"])
                for n in counts
            ]
            for kind in ("cpu", "peak")
        }
        cells = [part, PARTS[part], *map(_show, most["cpu"])]
        cells += [f"{peak:.0f}" for peak in most["peak"]]
        if len(counts) > 1:
            first, *_, last = most["cpu"]
            cells.append(f"{last / first:.2f}" if first >= NOISE["cpu"] else "")
        lines.append(f"| {' | '.join(cells)} |")
    for who, number in (("first rank", 0), ("last rank", -1)):
        whole = [max(cost["most"] for cost in among[n][number]["costs"].values()) for n in counts]
        cells = ["all, at the most", who, *[""] * len(counts), *(f"{size:.0f}" for size in whole)]
        lines.append(f"| {' | '.join([*cells, *[''] * (len(counts) > 1)])} |")
    return "\n".join(lines)


def _name_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _show(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"
