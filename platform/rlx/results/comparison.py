"""Compares recipes: how their experiments differ, and their metrics over seeds; and all that
went into two runs or experiment files."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from rlx.errors import SpecError
from rlx.evaluation import (
    FIGURES,
    EvaluationAnswers,
    ProblemDifference,
    SeedDifference,
    SeedMean,
    compare_by_problem,
    compute_paired_difference,
    compute_seed_mean,
    correct_p_values,
)
from rlx.launch import RUN_LIKE, collect_code_version, collect_environment_versions, open_registry
from rlx.plan import check_read_spec, read_spec
from rlx.spec import OWN_SUITE
from rlx.spec.reading import did_you_mean, list_leaf_values
from rlx.text import escape_unprintable
from rlx_registry import (
    EvaluationRecord,
    NotFoundError,
    Registry,
    RunRecord,
    fill_plugin_options,
    find_changed_plugins,
)

if TYPE_CHECKING:
    import pandas as pd

METRICS = (
    "accuracy", "mean_confidence", "brier", "brier_recalibrated", "nll", "auroc", "auroc_one_bit",
    "within_auroc", "aurc", "ece", "ece_debiased", "ece_mass", "alike_share",
)  # fmt: skip
"""Metrics that are compared, of every evaluation after training that has them."""

NOT_COMPARED = ("name", "seed")
"""Spec keys that do not distinguish recipes."""

NAMED = 5
"""Names that an error lists when none is similar."""

Evaluations = dict[str, list[EvaluationRecord]]
"""Evaluations by run id."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A run that no recipe contains; or its evaluation of a `suite`, made with other settings."""

    suite: str | None
    run: str
    why: str


def list_excluded_runs(
    named: Iterable[RunRecord], taken: Iterable[RunRecord]
) -> Iterator[Exclusion]:
    """The named runs that were not taken: the unfinished, and those with a newer twin."""
    instead = {(run.digest, run.seed): run for run in taken}
    for run in named:
        twin = instead.get((run.digest, run.seed))
        if twin is not None and twin.id == run.id:
            continue
        status = run.effective_status
        why = [] if run.status == "finished" else [f"it is {status}"]
        if twin is not None:
            newer = "" if why else ", and is newer"
            why.append(f"{twin.id} has the same spec and seed{newer}")
            if changed := find_changed_plugins(twin.plugins, run.plugins):
                why.append(f"{', '.join(changed)} changed between them")
        yield Exclusion(None, run.id, "; ".join(why))


def select_newest_runs(runs: Sequence[RunRecord]) -> dict[int, RunRecord]:
    """The newest run of each seed, ordered by seed."""
    ordered = sorted(runs, key=lambda run: int(run.id.rpartition("-")[2]))
    return dict(sorted({run.seed: run for run in ordered}.items()))


def select_comparable_evaluations(
    runs: Sequence[RunRecord], evaluations: Evaluations
) -> tuple[Evaluations, tuple[Exclusion, ...]]:
    """The evaluations that have the most common settings of their suite, on a tie those of the
    earliest run; and those that were excluded."""
    ways: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        for one in evaluations[run.id]:
            way: dict[str, Any] = {}  # empty where no settings are recorded
            if (suite := (one.payload or {}).get("suite")) is not None:
                own = suite["sets"].get(one.suite.rpartition("/")[2], {})
                is_own = suite["name"].partition(".")[0] == OWN_SUITE and suite["seed"] == run.seed
                way = {
                    "problems": own.get("problems") or suite["problems"],
                    "samples": suite["samples"],
                    "greedy": suite["greedy"],
                    "seed": "the run's" if is_own else suite["seed"],
                    "set": own.get("set", {}),
                }
            ways.setdefault(one.suite, {})[run.id] = way
    left = []
    for name, found in ways.items():
        usual = max(found.values(), key=[*found.values()].count)
        for run_id, way in found.items():
            if way == usual:
                continue
            why = "its settings, or those of the others, are not recorded"
            if way and usual:
                differ = (n for n in way if way[n] != usual[n])
                why = ", ".join(f"{n} {way[n]} instead of {usual[n]}" for n in differ)
            left.append(Exclusion(name, run_id, why))
    out = {(one.suite, one.run) for one in left}
    kept = {
        run: [one for one in own if (one.suite, run) not in out] for run, own in evaluations.items()
    }
    return kept, tuple(left)


@dataclass(frozen=True, slots=True)
class ComparedRecipe:
    """Runs of one experiment that differ only in their seed.

    Attributes:
        label: "A", "B", ... in the order of the arguments.
        runs: run id by seed; the newest run where a seed has several.
        values: value of each seed, by suite and metric.
        answers: answers of each seed, by suite, where they were recorded.
    """

    label: str
    digest: str
    name: str
    runs: dict[int, str]
    values: dict[tuple[str, str], dict[int, float]]
    answers: dict[str, dict[int, EvaluationAnswers]]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One metric of one suite, for all recipes: means over seeds, and differences from the first
    recipe over common seeds and problem by problem; None where there is none."""

    suite: str
    metric: str
    means: tuple[SeedMean | None, ...]
    differences: tuple[SeedDifference | None, ...]
    by_problem: tuple[ProblemDifference | None, ...]

    @property
    def p_holm(self) -> list[float | None]:
        """p-value of each difference, corrected for the number of recipes."""
        return correct_p_values([None if gap is None else gap.p for gap in self.differences])

    @property
    def by_problem_p_holm(self) -> list[float | None]:
        return correct_p_values([None if gap is None else gap.p for gap in self.by_problem])

    def list_records(self, labels: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields a flat record for each recipe that has the metric."""
        p_holm, by_problem_p_holm = self.p_holm, self.by_problem_p_holm
        for n, mean in enumerate(self.means):
            if mean is not None:
                gap, own = self.differences[n], self.by_problem[n]
                yield {
                    "suite": self.suite, "metric": self.metric, "recipe": labels[n],
                    "seeds": mean.n, "mean": mean.mean, "std": mean.std,
                    "low": mean.low, "high": mean.high,
                    **_name_gap("", gap, p_holm[n]),
                    "problems": None if own is None else own.problems,
                    **_name_gap("by_problem_", own, by_problem_p_holm[n]),
                }  # fmt: skip


def _name_gap(
    prefix: str, gap: SeedDifference | ProblemDifference | None, p_holm: float | None
) -> dict[str, float | None]:
    values = (None,) * 4 if gap is None else (gap.mean, gap.low, gap.high, gap.p)
    names = ("difference", "difference_low", "difference_high", "p", "p_holm")
    return {f"{prefix}{name}": v for name, v in zip(names, (*values, p_holm), strict=True)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of recipes.

    Attributes:
        spec: value of each recipe, by the spec paths in which they differ.
        rows: ordered by suite, then by metric.
        absent: by suite, why each recipe is not compared with the first problem by problem, or
            None; empty for a single recipe.
        left: named runs that no recipe contains.
        unlike: evaluations excluded because their settings differ from most of their suite.
        mixtures: sentences about recipes whose runs had different plugins.
    """

    recipes: tuple[ComparedRecipe, ...]
    spec: dict[str, tuple[Any, ...]]
    rows: tuple[ComparisonRow, ...]
    absent: dict[str, tuple[str | None, ...]]
    left: tuple[Exclusion, ...]
    unlike: tuple[Exclusion, ...]
    mixtures: tuple[str, ...] = ()

    @property
    def labels(self) -> list[str]:
        return [recipe.label for recipe in self.recipes]

    def list_records(self) -> list[dict[str, Any]]:
        """A flat record per suite, metric and recipe; differences are from the first."""
        return [one for row in self.rows for one in row.list_records(self.labels)]

    def to_frame(self) -> "pd.DataFrame":
        """A frame with the rows of `list_records`."""
        import pandas as pd

        return pd.DataFrame(self.list_records())


def compare_recipes(registry: Registry, names: Sequence[str]) -> Comparison:
    """Compares the recipes of the named runs, groups and experiments.

    Raises:
        NotFoundError: there is no run with this id.
        SpecError: a name is unknown, or none of the runs has finished.
    """
    runs = find_named_runs(registry, names)
    finished = [run for run in runs if run.status == "finished"]
    if not finished:
        states = ", ".join(f"{run.id} is {run.effective_status}" for run in runs)
        raise SpecError(f"there is nothing to compare yet: {states}")
    by_digest: dict[str, list[RunRecord]] = {}
    for run in finished:
        by_digest.setdefault(run.digest, []).append(run)
    seeds = [select_newest_runs(own) for own in by_digest.values()]
    taken = [run for own in seeds for run in own.values()]
    newest: Evaluations = {}  # after training, of each suite; probes have other metrics
    for run in taken:
        found = sorted(registry.results.evaluations(run.id), key=lambda e: e.at)
        after = (e for e in found if e.label == "after" and not e.suite.startswith("probe/"))
        newest[run.id] = list({e.suite: e for e in after}.values())
    evaluations, unlike = select_comparable_evaluations(taken, newest)
    recipes = tuple(
        _build_compared_recipe(ascii_uppercase[n] if n < 26 else f"R{n + 1}", own, evaluations)
        for n, own in enumerate(seeds)
    )
    left = tuple(list_excluded_runs(runs, taken))
    mixtures = []
    for recipe, own in zip(recipes, seeds, strict=True):
        one, *more = own.values()
        changes = {run.id: find_changed_plugins(run.plugins, one.plugins) for run in more}
        if other := next((run for run, changed in changes.items() if changed), None):
            plugins = escape_unprintable(", ".join(changes[other]))
            mixtures.append(
                f"{recipe.label} mixes plugins: {plugins} changed between {one.id} and {other}."
            )
    suites = dict.fromkeys(suite for recipe in recipes for suite, _ in recipe.values)
    rows, absent = list[ComparisonRow](), dict[str, tuple[str | None, ...]]()
    for suite in suites:
        first, *others = recipes
        pairs = [_compare_by_problem(recipe, first, suite) for recipe in others]
        rows += _build_comparison_rows(recipes, suite, [{}, *(found for found, _ in pairs)])
        if others:
            absent[suite] = (None, *(why for _, why in pairs))
    firsts = [dict(list_leaf_values(own[0].settings)) for own in by_digest.values()]
    return Comparison(
        recipes,
        {k: v for k, v in _find_differences(firsts).items() if k not in NOT_COMPARED},
        tuple(rows),
        absent,
        left,
        unlike,
        tuple(mixtures),
    )


def find_named_runs(registry: Registry, names: Sequence[str]) -> list[RunRecord]:
    """The runs of ids, groups and experiments, each once, in the order of the arguments; those of a
    group as they joined it, those of an experiment oldest first.

    Raises:
        NotFoundError: there is no run with this id.
        SpecError: a name is unknown.
    """
    groups, found = registry.groups(), dict[str, RunRecord]()
    for name in names:
        if name in groups:
            several = [registry.run(run) for run in groups[name]]
        else:
            several = registry.runs(name=name)[::-1] or [_find_single_run(registry, name, groups)]
        found |= {run.id: run for run in several if run.id not in found}
    return list(found.values())


def _find_single_run(registry: Registry, name: str, groups: Iterable[str]) -> RunRecord:
    try:
        return registry.run(name)
    except NotFoundError:
        if RUN_LIKE.fullmatch(name):
            raise
        there = dict.fromkeys([*groups, *(run.name for run in registry.runs())])
        hint = ""
        if near := did_you_mean(name, there):
            hint = f"; did you mean {escape_unprintable(near)!r}?"
        elif there:
            hint = f"; there are: {', '.join(map(escape_unprintable, [*there][:NAMED]))}"
        raise SpecError(
            f"there is no run, group or experiment {escape_unprintable(name)!r}{hint}"
        ) from None


def _build_compared_recipe(
    label: str, runs: Mapping[int, RunRecord], evaluations: Mapping[str, Sequence[EvaluationRecord]]
) -> ComparedRecipe:
    values: dict[tuple[str, str], dict[int, float]] = {}
    answers: dict[str, dict[int, EvaluationAnswers]] = {}
    for seed, run in runs.items():
        for evaluation in evaluations[run.id]:
            for metric in METRICS:
                value = evaluation.metrics.get(metric)
                if value is not None:
                    values.setdefault((evaluation.suite, metric), {})[seed] = float(value)
            if (own := EvaluationAnswers.from_payload(evaluation.payload)) is not None:
                answers.setdefault(evaluation.suite, {})[seed] = own
    ids = {seed: run.id for seed, run in runs.items()}
    first = next(iter(runs.values()))
    return ComparedRecipe(label, first.digest, first.name, ids, values, answers)


def _build_comparison_rows(
    recipes: Sequence[ComparedRecipe],
    suite: str,
    by_problem: Sequence[Mapping[str, ProblemDifference]],
) -> Iterator[ComparisonRow]:
    for metric in METRICS:
        seeds = [recipe.values.get((suite, metric), {}) for recipe in recipes]
        if any(seeds):
            largest = math.inf if metric == "nll" else 1.0
            means = [compute_seed_mean([*s.values()], (0.0, largest)) if s else None for s in seeds]
            gaps = [compute_paired_difference(s, seeds[0], (-largest, largest)) for s in seeds[1:]]
            own = tuple(found.get(metric) for found in by_problem)
            yield ComparisonRow(suite, metric, tuple(means), (None, *gaps), own)


def _compare_by_problem(
    recipe: ComparedRecipe, first: ComparedRecipe, suite: str
) -> tuple[dict[str, ProblemDifference], str | None]:
    """Compares a recipe with the first on the problems of a suite; or says why that cannot be."""
    sides = [side.answers.get(suite, {}) for side in (recipe, first)]
    if not all(sides):
        return {}, "one of them has no comparable evaluation with single answers"
    found = compare_by_problem(*sides)
    return found or {}, "they were evaluated on different problems" if found is None else None


SECTIONS = ("seed", "spec", "plugins", "data", "code", "environment")


@dataclass(frozen=True, slots=True)
class DiffSide:
    """Everything that determines the results of a run: values by dotted path, for each of
    `SECTIONS`."""

    name: str
    sections: Mapping[str, Mapping[str, Any]]


def find_side_differences(one: DiffSide, other: DiffSide) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Returns the differing values of every section, by path; None where a side lacks the value."""
    return {
        section: _find_differences([one.sections[section], other.sections[section]])
        for section in SECTIONS
    }


def _find_differences(sides: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Returns the values of all sides by the paths in which they differ."""
    paths = dict.fromkeys(path for side in sides for path in side)
    rows = {path: tuple(side.get(path) for side in sides) for path in paths}
    return {path: row for path, row in rows.items() if any(v != row[0] for v in row)}


def load_diff_side(name: str, url: str) -> DiffSide:
    """Loads the side of a run, or of an experiment file with what is installed here.

    Raises:
        InvalidSpec: the file is no valid experiment.
        SpecError: there is no such run.
    """
    path = Path(name)
    if not path.is_file():
        with open_registry(url) as registry:
            return _build_run_side(registry.run(name))
    read = read_spec(path)
    plugins = check_read_spec(read)
    used = plugins.list_records()
    return _build_diff_side(
        name,
        fill_plugin_options(read.spec.dump_resolved(), used),
        used,
        collect_code_version(),
        collect_environment_versions(),
    )


def _build_run_side(run: RunRecord) -> DiffSide:
    return _build_diff_side(run.id, run.settings, run.plugins, run.code, run.environment)


def _build_diff_side(
    name: str,
    spec: Mapping[str, Any],
    plugins: list[dict[str, Any]],
    code: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> DiffSide:
    own = ("distribution", "version", "entry_point", "sha256")
    parts = {
        "seed": {"seed": spec["seed"]},
        "spec": {key: value for key, value in spec.items() if key != "seed"},
        "plugins": {f"{p['kind']} {p['name']}": {key: p[key] for key in own} for p in plugins},
        "data": {f"{p['kind']} {p['name']}": p.get("data") or {} for p in plugins},
        "code": code,
        "environment": environment,
    }
    return DiffSide(
        name, {section: dict(list_leaf_values(part)) for section, part in parts.items()}
    )


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


def build_comparison_json(found: Comparison) -> dict[str, Any]:
    return {
        "recipes": [
            {"label": r.label, "digest": r.digest, "name": r.name, "runs": r.runs}
            for r in found.recipes
        ],
        "spec": {path: list(values) for path, values in found.spec.items()},
        "figures": found.list_records(),
        "not_by_problem": found.absent,
        "left_out": {one.run: one.why for one in found.left},
        "mixtures": list(found.mixtures),
        "unlike": [asdict(one) for one in found.unlike],
    }


def build_comparison_tables(found: Comparison) -> Iterator[tuple[str, Table]]:
    rows = [
        [r.label, r.name, r.digest, " ".join(map(str, r.runs)), " ".join(r.runs.values())]
        for r in found.recipes
    ]
    yield "Recipes", [["", "experiment", "spec", "seeds", "runs"], *rows]
    labels, first = found.labels, found.labels[0]
    if found.spec:
        rows = [[path, *map(format_setting, values)] for path, values in found.spec.items()]
        yield "What they differ in", [["", *labels], *rows]
    minus_first = [f"{label} − {first}" for label in labels[1:]]
    for suite in dict.fromkeys(row.suite for row in found.rows):
        own = [row for row in found.rows if row.suite == suite]
        table = [["", *labels, *minus_first]]
        for row in own:
            means = ["–" if m is None else f"{m.mean:.3f}{_format_interval(m)}" for m in row.means]
            gaps = map(_format_difference, row.differences[1:], row.p_holm[1:])
            table.append([row.metric, *means, *gaps])
        title = f"After training: {escape_unprintable(suite)}"
        yield title, table
        paired = sorted(
            (row for row in own if any(row.by_problem)), key=lambda row: FIGURES.index(row.metric)
        )
        if paired:
            counts = [str(gap.problems) if gap else "–" for gap in paired[0].by_problem[1:]]
            table = [["", *minus_first], ["problems", *counts]]
            for row in paired:
                gaps = map(_format_difference, row.by_problem[1:], row.by_problem_p_holm[1:])
                table.append([row.metric, *gaps])
            yield f"{title}, problem by problem", table


def format_comparison_markdown(found: Comparison) -> str:
    lines: list[str] = []
    for title, (head, *rows) in build_comparison_tables(found):
        table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        cells = [[escape_unprintable(cell).replace("|", "\\|") for cell in row] for row in table]
        lines += [f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in cells), ""]
    return "\n".join([*lines, *list_comparison_notes(found)]) + "\n"


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
    if any(any(row.by_problem) for row in found.rows):
        notes.append(BY_PROBLEM)
    notes += [
        f"{escape_unprintable(suite)}: {found.labels[0]} and {label} are not compared problem by "
        f"problem: {why}."
        for suite, reasons in found.absent.items()
        for label, why in zip(found.labels, reasons, strict=True)
        if why is not None
    ]
    notes += [
        f"{escape_unprintable(one.suite or '')}: {one.run} is left out, since it is not "
        f"comparable: {escape_unprintable(one.why)}."
        for one in found.unlike
    ]
    notes += [f"{one.run} is left out: {escape_unprintable(one.why)}." for one in found.left]
    return [*notes, *found.mixtures]


def format_setting(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def _format_difference(gap: SeedDifference | ProblemDifference | None, p: float | None) -> str:
    if gap is None or p is None:
        return "–"
    return f"{gap.mean:+.3f}{_format_interval(gap, '+')} (p {p:.2g})"


def _format_interval(mean: SeedMean | ProblemDifference, sign: str = "") -> str:
    if mean.low is None or mean.high is None:
        return ""
    half = mean.high - mean.mean
    if isinstance(mean, SeedMean) and math.isclose(half, mean.mean - mean.low, abs_tol=1e-9):
        return f" ± {half:.3f}"
    return f" [{mean.low:{sign}.3f}, {mean.high:{sign}.3f}]"
