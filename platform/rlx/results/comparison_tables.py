"""Renders a comparison as tables, Markdown and JSON."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rlx.evaluation import FIGURES, ProblemDifference, SeedDifference, SeedMean
from rlx.results.comparison import Comparison, SuiteDifferences
from rlx.text import escape_unprintable

Table = list[list[str]]

BY_PROBLEM = (
    "Problem by problem: each problem's mean over answers and seeds, one recipe's minus the "
    "other's, with more weight on problems evaluated more often; [ ] is the 95 % bootstrap "
    "interval over problems, p the paired permutation test over problems: exact for up to 13 that "
    "differ, else from 9999 random sign changes. It takes the trained models as fixed; "
    "how the recipes would do with other seeds is for the test over seeds."
)

FAMILY = (
    "Each p is corrected by Holm's method for the recipes in its row. The rows are not corrected "
    "for each other: take the metric that was chosen beforehand, and the others as exploratory."
)


def format_comparison_markdown(found: Comparison) -> str:
    """Returns the tables as Markdown, each with a title."""
    lines: list[str] = []
    for title, table in build_comparison_tables(found):
        head, *rows = [
            [cell.replace("|", "\\|") for cell in map(escape_unprintable, r)] for r in table
        ]
        lines += [
            f"**{title}**",
            "",
            _format_markdown_row(head),
            _format_markdown_row(["---", *["---:"] * (len(head) - 1)]),
        ]
        lines += [*map(_format_markdown_row, rows), ""]
    return "\n".join([*lines, *list_comparison_notes(found)]) + "\n"


def build_comparison_json(found: Comparison) -> dict[str, Any]:
    """Returns the comparison as plain JSON values."""
    return {
        "recipes": [
            {"label": r.label, "digest": r.digest, "name": r.name, "runs": r.runs}
            for r in found.recipes
        ],
        "spec": {path: list(values) for path, values in found.spec.items()},
        "figures": [{**asdict(row), "p_holm": row.p_holm} for row in found.rows],
        "by_problem": [_build_pairs_json(pairs) for pairs in found.by_problem],
        "left_out": [one.run for one in found.left],
        "left_out_reasons": {one.run: one.why for one in found.left},
        "mixtures": list(found.mixtures),
        "unlike": [asdict(one) for one in found.unlike],
    }


def _build_pairs_json(pairs: SuiteDifferences) -> dict[str, Any]:
    metrics = dict.fromkeys(metric for one in pairs.differences if one for metric in one)
    return {**asdict(pairs), "p_holm": {name: pairs.compute_p_holm(name) for name in metrics}}


def describe_exclusions(found: Comparison) -> list[str]:
    """Returns sentences that name the excluded evaluations and runs, with reasons."""
    sentences = [
        f"{escape_unprintable(one.suite)}: {one.run} is left out, since it is not comparable: "
        f"{escape_unprintable(one.why)}."
        for one in found.unlike
    ]
    sentences += [f"{one.run} is left out: {escape_unprintable(one.why)}." for one in found.left]
    return [*sentences, *found.mixtures]


# Tables ----------------------------------------------------------------------------------------


def build_comparison_tables(found: Comparison) -> Iterator[tuple[str, Table]]:
    yield (
        "Recipes",
        [
            ["", "experiment", "spec", "seeds", "runs"],
            *(
                [r.label, r.name, r.digest, " ".join(map(str, r.runs)), " ".join(r.runs.values())]
                for r in found.recipes
            ),
        ],
    )
    labels = [recipe.label for recipe in found.recipes]
    if found.spec:
        rows = [[path, *map(_format_spec_value, values)] for path, values in found.spec.items()]
        yield "What they differ in", [["", *labels], *rows]
    first = labels[0]
    for suite in dict.fromkeys(row.suite for row in found.rows):
        heads = [*labels, *(f"{label} − {first}" for label in labels[1:])]
        rows = [
            [
                row.metric,
                *map(_format_seed_mean, row.means),
                *map(_format_seed_difference, row.differences[1:], row.p_holm[1:]),
            ]
            for row in found.rows
            if row.suite == suite
        ]
        yield f"After training: {escape_unprintable(suite)}", [["", *heads], *rows]
        for pairs in found.by_problem:
            if pairs.suite == suite and any(pairs.differences):
                title = f"After training: {escape_unprintable(suite)}, problem by problem"
                yield title, _problem_table(found, pairs)


def _problem_table(found: Comparison, pairs: SuiteDifferences) -> Table:
    first, *others = (recipe.label for recipe in found.recipes)
    columns = [differences or {} for differences in pairs.differences[1:]]
    counts = [str(next(iter(c.values())).problems) if c else "–" for c in columns]
    rows = [
        [
            figure,
            *(
                _problem_gap(column.get(figure), p)
                for column, p in zip(columns, pairs.compute_p_holm(figure)[1:], strict=True)
            ),
        ]
        for figure in FIGURES
        if any(figure in column for column in columns)
    ]
    heads = [f"{label} − {first}" for label in others]
    return [["", *heads], ["problems", *counts], *rows]


def list_comparison_notes(found: Comparison) -> list[str]:
    notes = [
        "± is half the 95 % interval of Student's t over seeds; [ ] is the interval where it ends "
        "at the limit of the metric. Two seeds have none."
    ]
    if len(found.recipes) > 1:
        notes.append(
            "Differences are seed by seed, over the seeds that both have; p is the exact paired "
            "permutation test's."
        )
    if len(found.recipes) > 2:
        notes.append(FAMILY)
    if any(any(pairs.differences) for pairs in found.by_problem):
        notes.append(BY_PROBLEM)
    for pairs in found.by_problem:
        for recipe, why in zip(found.recipes, pairs.absent, strict=True):
            if why is not None:
                both = f"{found.recipes[0].label} and {recipe.label}"
                suite = escape_unprintable(pairs.suite)
                notes.append(f"{suite}: {both} are not compared problem by problem: {why}.")
    return notes + describe_exclusions(found)


def _format_spec_value(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def _format_seed_mean(mean: SeedMean | None) -> str:
    if mean is None:
        return "–"
    return f"{mean.mean:.3f}{_format_interval(mean)}"


def _format_seed_difference(gap: SeedDifference | None, p: float | None) -> str:
    if gap is None or p is None:
        return "–"
    return f"{gap.over.mean:+.3f}{_format_interval(gap.over, '+')} (p {p:.2g})"


def _format_interval(mean: SeedMean, sign: str = "") -> str:
    if mean.low is None or mean.high is None:
        return ""
    half = mean.high - mean.mean
    if math.isclose(half, mean.mean - mean.low, abs_tol=1e-9):
        return f" ± {half:.3f}"
    return f" [{mean.low:{sign}.3f}, {mean.high:{sign}.3f}]"


def _problem_gap(gap: ProblemDifference | None, p: float | None) -> str:
    if gap is None or p is None:
        return "–"
    return f"{gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}] (p {p:.2g})"


def _format_markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
