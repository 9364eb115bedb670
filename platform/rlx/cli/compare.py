"""`rlx compare`: recipes side by side, what they differ in first, then what came of it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.diff import of_run
from rlx.cli.registry import open_registry, registry_option
from rlx.errors import EnvironmentFault, SpecError
from rlx.spec.diagnostic import printable
from rlx_registry import EvaluationRecord, Registry, RunRecord

if TYPE_CHECKING:
    from rlx.evaluation.paired import Difference, Mean

__all__ = ["Comparison", "Recipe", "compare", "compared"]

METRICS = (
    "accuracy", "mean_confidence", "brier", "nll", "ece", "ece_mass", "auroc", "aurc", "alike_share"
)  # fmt: skip
"""Of every evaluation after training, where it has them."""
UNTOLD = ("name", "seed")
"""Of a spec: what does not make another recipe."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Runs of one experiment that differ in their seeds.

    Attributes:
        label: "A", "B", ... in the order in which they were named.
        digest: of the experiment.
        name: as the first of its runs has it.
        runs: run ids by seed; the newest where a seed was run more than once.
        values: for each suite and metric the figure of every seed.
    """

    label: str
    digest: str
    name: str
    runs: dict[int, str]
    values: dict[tuple[str, str], dict[int, float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of all recipes.

    Attributes:
        means: over seeds, by recipe; None where it has none.
        differences: from the first recipe, over the seeds that both have.
    """

    suite: str
    metric: str
    means: "tuple[Mean | None, ...]"
    differences: "tuple[Difference | None, ...]"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that is said of some recipes.

    Attributes:
        spec: for every path of the experiment in which they differ its value in each.
        rows: by suite, then by metric.
        left: runs that were named and have not finished.
    """

    recipes: tuple[Recipe, ...]
    spec: dict[str, tuple[Any, ...]]
    rows: tuple[Row, ...]
    left: tuple[str, ...]


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|NAME...")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print a line per recipe and figure.")
@click.option("--md", "form", flag_value="md", help="Print Markdown.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write HTML.")
@registry_option
def compare(names: tuple[str, ...], form: str | None, page: Path | None, url: str) -> None:
    """Compare recipes: the difference of their experiments, then figures over seeds.

    Runs are put together that differ in their seeds alone; a NAME means all finished runs of that
    name. Intervals are Student's over seeds. Differences are from the first recipe, seed by seed,
    with the exact paired permutation test: with 3 seeds p is never below .25, with 5 never below
    .0625.
    """
    from rlx.cli import compared as shown

    with open_registry(url) as registry:
        found = compared(registry, names)
    if page is not None:
        try:
            page.write_text(shown.html(found), encoding="utf-8")
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write {printable(str(page))}: {error.strerror or error}"
            ) from error
        click.echo(printable(str(page)), err=True)
    if form == "json":
        click.echo(json.dumps(shown.plain(found), indent=2))
    elif form == "csv":
        click.echo(shown.csv(found), nl=False)
    elif form == "md":
        click.echo(shown.markdown(found), nl=False)
    elif page is None:
        shown.show(found)


def compared(registry: Registry, names: Sequence[str]) -> Comparison:
    """Compares the runs that are named.

    Raises:
        NotFound: a name is nobody's.
        SpecError: none of the runs has finished.
    """
    runs = _named(registry, names)
    finished = [run for run in runs if run.status == "finished"]
    if not finished:
        states = ", ".join(f"{run.id} is {run.effective_status}" for run in runs)
        raise SpecError(f"there is nothing to compare yet: {states}")
    by_digest: dict[str, list[RunRecord]] = {}
    for run in finished:
        by_digest.setdefault(run.digest, []).append(run)
    recipes = tuple(
        _recipe(registry, _label(number), own) for number, own in enumerate(by_digest.values())
    )
    firsts = [own[0] for own in by_digest.values()]
    left = tuple(run.id for run in runs if run.status != "finished")
    return Comparison(recipes, _unlike(firsts), tuple(_rows(recipes)), left)


def _named(registry: Registry, names: Sequence[str]) -> list[RunRecord]:
    """Runs in the order in which they were named, oldest first under one name, each once."""
    found: dict[str, RunRecord] = {}
    for name in names:
        several = sorted(registry.runs(name=name), key=lambda run: run.id)
        for run in several or [registry.run(name)]:
            found.setdefault(run.id, run)
    return list(found.values())


def _label(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"R{number + 1}"


def _recipe(registry: Registry, label: str, runs: Sequence[RunRecord]) -> Recipe:
    newest = {run.seed: run for run in sorted(runs, key=lambda run: run.id)}
    values: dict[tuple[str, str], dict[int, float]] = {}
    for seed, run in sorted(newest.items()):
        for evaluation in _last(registry.evaluations(run.id)):
            for metric in METRICS:
                value = evaluation.metrics.get(metric)
                if value is not None:
                    values.setdefault((evaluation.suite, metric), {})[seed] = float(value)
    ids = {seed: run.id for seed, run in sorted(newest.items())}
    return Recipe(label, runs[0].digest, runs[0].name, ids, values)


def _last(evaluations: Iterable[EvaluationRecord]) -> list[EvaluationRecord]:
    """After training, the newest of each suite; probes have other figures."""
    found: dict[str, EvaluationRecord] = {}
    for evaluation in sorted(evaluations, key=lambda e: e.at):
        if evaluation.label == "after" and not evaluation.suite.startswith("probe/"):
            found[evaluation.suite] = evaluation
    return list(found.values())


def _unlike(runs: Sequence[RunRecord]) -> dict[str, tuple[Any, ...]]:
    specs = [of_run(run).sections["spec"] for run in runs]
    paths = [p for p in dict.fromkeys(p for spec in specs for p in spec) if p not in UNTOLD]
    rows = {path: tuple(spec.get(path) for spec in specs) for path in paths}
    return {path: row for path, row in rows.items() if any(v != row[0] for v in row)}


def _rows(recipes: Sequence[Recipe]) -> Iterable[Row]:
    from rlx.evaluation.paired import difference, mean_over_seeds

    suites = dict.fromkeys(suite for recipe in recipes for suite, _ in recipe.values)
    for suite in suites:
        for metric in METRICS:
            seeds = [recipe.values.get((suite, metric), {}) for recipe in recipes]
            if any(seeds):
                yield Row(
                    suite,
                    metric,
                    tuple(mean_over_seeds(list(s.values())) if s else None for s in seeds),
                    (None, *(difference(s, seeds[0]) for s in seeds[1:])),
                )
