"""A comparison as text, Markdown, CSV, JSON and HTML: the same cells everywhere."""

import io
import json
from collections.abc import Iterator, Sequence
from csv import writer
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any

from rlx.spec.diagnostic import printable

if TYPE_CHECKING:
    from rlx.cli.compare import Comparison, Recipe
    from rlx.evaluation.paired import Difference, Mean

__all__ = ["csv", "html", "markdown", "plain", "show"]

Table = list[list[str]]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .8rem;text-align:right;"
    "border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}"
)


def show(found: "Comparison") -> None:
    """Prints to the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Rich

    console = Console(highlight=False)
    for title, table in _tables(found):
        drawn = Rich(
            title=title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE,
            show_edge=False,
            pad_edge=False,
        )
        for number, heading in enumerate(table[0]):
            drawn.add_column(printable(heading), justify="right" if number else "left")
        for row in table[1:]:
            drawn.add_row(*map(printable, row))
        console.print(drawn)
        console.print()
    for line in _notes(found):
        console.print(line, style="dim", markup=False)


def markdown(found: "Comparison") -> str:
    """Tables as Markdown, with a title each."""
    lines: list[str] = []
    for title, table in _tables(found):
        head, *rows = [[cell.replace("|", "\\|") for cell in map(printable, r)] for r in table]
        lines += [f"**{title}**", "", _line(head), _line(["---", *["---:"] * (len(head) - 1)])]
        lines += [*map(_line, rows), ""]
    return "\n".join([*lines, *_notes(found)]) + "\n"


def html(found: "Comparison") -> str:
    """A page that stands alone."""
    parts = [
        f"<!doctype html><meta charset=utf-8><title>rlx compare</title><style>{_STYLE}</style>"
    ]
    for title, (head, *rows) in _tables(found):
        parts.append(f"<h2>{escape(title)}</h2><table><thead>{_cells(head, 'th')}</thead><tbody>")
        parts += [*(_cells(row, "td") for row in rows), "</tbody></table>"]
    parts += [f"<p>{escape(line)}</p>" for line in _notes(found)]
    return "\n".join(parts) + "\n"


def csv(found: "Comparison") -> str:
    """One line per suite, metric and recipe, in full precision."""
    out = io.StringIO()
    table = writer(out)
    heads = ("suite", "metric", "recipe", "seeds", "mean", "std", "low", "high")
    table.writerow((*heads, "difference", "difference_low", "difference_high", "p"))
    for row in found.rows:
        for recipe, mean, gap in zip(found.recipes, row.means, row.differences, strict=True):
            if mean is not None:
                told = [mean.n, mean.mean, mean.std, mean.low, mean.high]
                over = [None] * 4 if gap is None else [gap.over.mean, gap.over.low, gap.over.high]
                over += [] if gap is None else [gap.p]
                table.writerow([row.suite, row.metric, recipe.label, *told, *over])
    return out.getvalue()


def plain(found: "Comparison") -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "recipes": [
            {"label": r.label, "digest": r.digest, "name": r.name, "runs": r.runs}
            for r in found.recipes
        ],
        "spec": {path: list(values) for path, values in found.spec.items()},
        "figures": [asdict(row) for row in found.rows],
        "left_out": list(found.left),
    }


# Inside ----------------------------------------------------------------------------------------


def _tables(found: "Comparison") -> Iterator[tuple[str, Table]]:
    yield (
        "Recipes",
        [
            ["", "experiment", "spec", "seeds", "runs"],
            *(
                [r.label, r.name, r.digest, _seeds(r), " ".join(r.runs.values())]
                for r in found.recipes
            ),
        ],
    )
    labels = [recipe.label for recipe in found.recipes]
    if found.spec:
        rows = [[path, *map(_value, values)] for path, values in found.spec.items()]
        yield "What they differ in", [["", *labels], *rows]
    first = labels[0]
    for suite in dict.fromkeys(row.suite for row in found.rows):
        heads = [*labels, *(f"{label} − {first}" for label in labels[1:])]
        rows = [
            [row.metric, *map(_mean, row.means), *map(_gap, row.differences[1:])]
            for row in found.rows
            if row.suite == suite
        ]
        yield f"After training: {printable(suite)}", [["", *heads], *rows]


def _notes(found: "Comparison") -> list[str]:
    notes = ["± is half the 95 % interval of Student's t over seeds."]
    if len(found.recipes) > 1:
        notes.append(
            "Differences are seed by seed, over the seeds that both have; p is of the exact paired "
            "permutation test."
        )
    if found.left:
        notes.append(f"Left out, for they have not finished: {', '.join(found.left)}.")
    return notes


def _seeds(recipe: "Recipe") -> str:
    return " ".join(str(seed) for seed in recipe.runs)


def _value(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def _mean(mean: "Mean | None") -> str:
    if mean is None:
        return "–"
    half = "" if mean.high is None else f" ± {mean.high - mean.mean:.3f}"
    return f"{mean.mean:.3f}{half}"


def _gap(gap: "Difference | None") -> str:
    if gap is None:
        return "–"
    half = "" if gap.over.high is None else f" ± {gap.over.high - gap.over.mean:.3f}"
    return f"{gap.over.mean:+.3f}{half} (p {gap.p:.2g})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(cells: Sequence[str], tag: str) -> str:
    inside = "".join(f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>"
