"""Writes study.md, study_tables.md and their pictures from the registry.

The texts are page.md and tables.md beside this file, Jinja templates that refer to every number by
name. Corrected figures are computed from the recorded answers, since older runs have none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from study_rescore import read_rescored

from rlx.evaluation import (
    compute_auroc,
    compute_brier,
    compute_debiased_ece,
    compute_expected_calibration_error,
    compute_one_bit_auroc,
    compute_paired_difference,
    compute_recalibrated_brier,
    compute_seed_mean,
    compute_within_auroc,
)
from rlx.results import Comparison, ComparisonRow, compare_recipes
from rlx_registry import Registry

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "experiments" / "study"
PAGES = {"page.md": TEMPLATES / "study.md", "tables.md": TEMPLATES / "study_tables.md"}
PICTURES = TEMPLATES / "pictures"
HEADS = {
    "accuracy": "accuracy",
    "mean_confidence": "stated",
    "brier": "Brier",
    "ece": "ECE",
    "auroc": "AUROC",
    "within_auroc": "AUROC within kinds",
    "alike_share": "all alike",
}
SMALLEST_P = 0.0002
"""Of a permutation test with 9,999 random sign flips, two-sided."""
WITHIN = ("accuracy", "mean_confidence", "brier", "ece", "auroc")
"""Metrics available for every kind of problem."""
CORRECTED = {
    "accuracy": "accuracy",
    "brier": "Brier",
    "brier_recalibrated": "Brier, recalibrated",
    "brier_one_bit": "Brier, one bit recalibrated",
    "ece_debiased": "ECE, debiased",
    "within_auroc": "AUROC within kinds",
    "within_one_bit": "the same, one bit",
}


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one evaluation: `n` labels, confidences (unreadable ones are 0), problems,
    kinds of problem, and whether the confidence is readable."""

    correct: NDArray[np.float64]
    stated: NDArray[np.float64]
    problems: NDArray[np.str_]
    kinds: NDArray[np.str_]
    readable: NDArray[np.bool_]

    @property
    def bit(self) -> NDArray[np.float64]:
        """`[n]` 1 where the confidence is at least .5, otherwise 0."""
        return (self.stated >= 0.5).astype(np.float64)

    def only_readable(self) -> "Answers":
        """The answers whose confidence is readable."""
        parts = (self.correct, self.stated, self.problems, self.kinds, self.readable)
        return Answers(*(part[self.readable] for part in parts))


MEASURES: dict[str, Callable[[Answers], float | None]] = {
    "accuracy": lambda a: float(a.correct.mean()),
    "brier": lambda a: compute_brier(a.correct, a.stated),
    "brier_recalibrated": lambda a: compute_recalibrated_brier(
        a.correct, a.stated, a.problems.tolist()
    ),
    "brier_one_bit": lambda a: compute_recalibrated_brier(a.correct, a.bit, a.problems.tolist()),
    "ece_debiased": lambda a: compute_debiased_ece(a.correct, a.stated),
    "extreme": lambda a: float(np.isin(a.stated, (0.0, 1.0)).mean()),
    "auroc": lambda a: compute_auroc(a.correct, a.stated),
    "auroc_one_bit": lambda a: compute_one_bit_auroc(a.correct, a.stated),
    "within_auroc": lambda a: compute_within_auroc(a.correct, a.stated, a.kinds),
    "within_one_bit": lambda a: compute_within_auroc(a.correct, a.bit, a.kinds),
}
"""Figures computed from recorded answers, by name."""


@dataclass(frozen=True)
class Group:
    """The results of one question's recipes.

    Attributes:
        registry: the registry of the runs.
        labels: the recipes' labels, the reference recipe first.
        runs: each recipe's run ids by seed.
    """

    registry: Registry
    labels: tuple[str, ...]
    runs: tuple[dict[int, str], ...]

    @cached_property
    def compared(self) -> Comparison:
        """The comparison, as in `rlx compare`."""
        return compare_recipes(self.registry, [run for own in self.runs for run in own.values()])

    def row(self, suite: str, metric: str) -> ComparisonRow:
        """One metric of all recipes.

        Raises:
            KeyError: no recipe has the metric.
        """
        found = [r for r in self.compared.rows if (r.suite, r.metric) == (suite, metric)]
        if not found:
            raise KeyError(f"nothing has {metric} on {suite}")
        return found[0]

    def place(self, label: str) -> int:
        """The index of the recipe with a label."""
        return self.labels.index(label)

    # Methods for the template ---------------------------------------------------------------------

    def table(self, suite: str, *metrics: str) -> str:
        """A table of means over seeds with intervals, one line per recipe."""
        suite, selected = of_suite(suite), metrics or tuple(HEADS)
        rows = [self.row(suite, metric) for metric in selected]
        lines = [["recipe", "seeds", *(HEADS.get(m, m) for m in selected)]]
        for n, label in enumerate(self.labels):
            means = [row.means[n] for row in rows]
            lines.append([label, str(len(self.runs[n])), *map(shown_mean, means)])
        return markdown(lines)

    def strata(self, suite: str) -> str:
        """A table of accuracy and calibration, one line per recipe and kind of problem."""
        lines = [["recipe", "problems", *(HEADS[m] for m in WITHIN)]]
        for label in self.labels:
            strata = [each["by_stratum"] for each in self.metrics(label, suite)]
            for kind in sorted({kind for each in strata for kind in each}):
                own = [each[kind] for each in strata if kind in each]
                values = ([o[m] for o in own if o[m] is not None] for m in WITHIN)
                means = [compute_seed_mean(found) if found else None for found in values]
                lines.append([label, kind, *map(shown_mean, means)])
        return markdown(lines)

    def share(self, label: str, suite: str, metric: str) -> str:
        """A recipe's mean of a metric that `rlx compare` does not have, as text."""
        return f"{np.mean([each[metric] for each in self.metrics(label, suite)]):.3f}"

    def ece_if_true(self, label: str, suite: str, draws: int = 200) -> str:
        """Expected ECE if every answer were right with its stated probability, by simulation."""
        rng, found = np.random.default_rng(0), []
        for payload in self.payloads(label, suite):
            stated = np.array([c or 0.0 for c in payload["confidence"]])  # unparsable counts as 0
            right = (rng.random((draws, stated.size)) < stated).astype(float)
            found += [compute_expected_calibration_error(own, stated) for own in right]
        return f"{np.mean(found):.3f}"

    def has(self, suite: str) -> bool:
        """Whether every run has been evaluated on a set."""
        return all(
            len(self.metrics(label, suite)) == len(own)
            for label, own in zip(self.labels, self.runs, strict=True)
        )

    def differences(self, suite: str, *metrics: str) -> str:
        """A table of differences from the first recipe: over seeds, and problem by problem."""
        suite, first = of_suite(suite), self.labels[0]
        lines = [["recipe", *(f"{HEADS.get(m, m)}" for m in metrics)]]
        for n, label in list(enumerate(self.labels))[1:]:
            lines.append([f"{label} − {first}, over seeds"])
            for metric in metrics:
                gap = self.row(suite, metric).differences[n]
                lines[-1].append("–" if gap is None else shown_gap(gap))
            lines.append([f"{label} − {first}, by problem"])
            for metric in metrics:
                one = self.row(suite, metric).by_problem[n]
                text = one and f"{one.mean:+.3f} [{one.low:+.3f}, {one.high:+.3f}] (p {one.p:.2g})"
                lines[-1].append(text or "–")
        return markdown(lines)

    def mean(self, label: str, suite: str, metric: str) -> str:
        """A recipe's mean of a metric, as text."""
        found = self.row(of_suite(suite), metric).means[self.place(label)]
        return "–" if found is None else f"{found.mean:.3f}"

    def gap(self, label: str, suite: str, metric: str) -> str:
        """A recipe's difference from the first recipe over seeds, as text."""
        found = self.row(of_suite(suite), metric).differences[self.place(label)]
        return "–" if found is None else shown_gap(found)

    def curve(self, label: str, metric: str) -> tuple[list[int], np.ndarray]:
        """Returns the steps, and the metric's values, `[seeds, steps]`."""
        own = [
            dict(self.registry.results.metrics(run, [metric]).get(metric, []))
            for run in self.runs[self.place(label)].values()
        ]
        steps = sorted(set.intersection(*map(set, own))) if own else []
        return steps, np.array([[each[s] for s in steps] for each in own])

    def average(self, label: str, metric: str) -> str:
        """A training metric's mean over steps and seeds, as text."""
        _, values = self.curve(label, metric)
        return f"{values.mean():.3f}" if values.size else "–"

    def recorded(self, heads: dict[str, str], *, last: int = 5) -> str:
        """A table of final training or probe metrics, as means over seeds, one line per recipe.

        Args:
            heads: metrics by column title.
            last: number of final values to average.
        """
        lines = [["recipe", "seeds", *heads]]
        for n, label in enumerate(self.labels):
            lines.append([label, str(len(self.runs[n]))])
            for metric in heads.values():
                _, values = self.curve(label, metric)
                ends = values[:, -last:].mean(axis=1).tolist() if values.size else []
                lines[-1].append(shown_mean(compute_seed_mean(ends) if ends else None))
        return markdown(lines)

    def measure(
        self, label: str, name: str, *, readable: bool = False, suite: str = "held_out"
    ) -> dict[int, float]:
        """A figure of `MEASURES` by seed, computed from the recorded answers.

        Args:
            label: the recipe.
            name: the figure.
            readable: leaves out answers whose confidence is unreadable, instead of taking it for 0.
            suite: the evaluated set.
        """
        found = {}
        seeds = self.runs[self.place(label)]
        for seed, payload in zip(seeds, self.payloads(label, suite), strict=True):
            answers = read_answers(payload)
            value = MEASURES[name](answers.only_readable() if readable else answers)
            if value is not None:
                found[seed] = value
        return found

    def estimate(self, label: str, name: str, **options: Any) -> str:
        """A recipe's mean of a figure of `MEASURES`, as text; options of `measure`."""
        found = self.measure(label, name, **options)
        return f"{compute_seed_mean(list(found.values())).mean:.3f}"

    def spread(self, label: str, name: str, **options: Any) -> str:
        """`estimate` with half of its 95 % interval over seeds."""
        return shown_mean(compute_seed_mean(list(self.measure(label, name, **options).values())))

    def against(self, label: str, name: str, **options: Any) -> str:
        """A recipe's difference from the first one in a figure of `MEASURES`, as text."""
        return self.beside(label, self, self.labels[0], name, **options)

    def beside(self, label: str, other: "Group", reference: str, name: str, **options: Any) -> str:
        """A recipe's difference in a figure of `MEASURES` from one of any group, as text."""
        own, theirs = (
            self.measure(label, name, **options),
            other.measure(reference, name, **options),
        )
        gap = compute_paired_difference(own, theirs)
        return "–" if gap is None else shown_gap(gap)

    def beyond(self, label: str, name: str, bit: str, **options: Any) -> str:
        """A figure of the stated confidence less that of its one bit, paired by seed, as text."""
        stated, of_bit = self.measure(label, name, **options), self.measure(label, bit, **options)
        gap = compute_paired_difference(stated, of_bit)
        if gap is None or gap.low is None:
            return "–"
        return f"{gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"

    def corrected(self, *names: str) -> str:
        """A table of figures in `CORRECTED`, by default all, one line per recipe."""
        shown = names or tuple(CORRECTED)
        lines = [["recipe", "seeds", *(CORRECTED[name] for name in shown)]]
        for label in self.labels:
            values = [list(self.measure(label, name).values()) for name in shown]
            means = [shown_mean(compute_seed_mean(own)) for own in values]
            lines.append([label, str(len(self.runs[self.place(label)])), *means])
        return markdown(lines)

    def brier_gaps(self) -> str:
        """A table of Brier differences from the first recipe: over seeds, with and without
        unreadable confidences, and by problem with Holm's correction over the recipes."""
        head = f"Brier, less that of {self.labels[0]}"
        lines = [[head, "over seeds", "readable only", "by problem", "p by problem (Holm)"]]
        row = self.row("held_out", "brier")
        smallest = SMALLEST_P * (len(self.labels) - 1)
        for n, (label, p) in enumerate(zip(self.labels, row.by_problem_p_holm, strict=True)):
            own = row.by_problem[n]
            if not n or own is None or p is None:
                continue
            seeds = self.against(label, "brier")
            readable = self.against(label, "brier", readable=True)
            problems = f"{own.mean:+.3f} [{own.low:+.3f}, {own.high:+.3f}]"
            shown = f"≤ {smallest:.2g}" if p <= smallest else f"{p:.2g}"
            lines.append([label, seeds, readable, problems, shown])
        return markdown(lines)

    def distinct(self, suite: str = "held_out") -> str:
        """Number of distinct problems in one run's evaluation, least and most, as text."""
        found = {
            len(set(payload["problem_ids"]))
            for label in self.labels
            for payload in self.payloads(label, suite)
        }
        return f"{min(found)} to {max(found)}" if len(found) > 1 else str(min(found))

    def payloads(self, label: str, suite: str) -> list[dict[str, Any]]:
        """The payloads of every seed's evaluation on a set after training."""
        found = []
        for run in self.runs[self.place(label)].values():
            evaluations = self.registry.results.evaluations(run, of_suite(suite))
            found += [dict(e.payload) for e in evaluations if e.label == "after" and e.payload]
        return found

    def metrics(self, label: str, suite: str) -> list[dict[str, Any]]:
        """The metrics of every seed's evaluation on a set after training."""
        found = []
        for run in self.runs[self.place(label)].values():
            evaluations = self.registry.results.evaluations(run, of_suite(suite))
            found += [dict(e.metrics) for e in evaluations if e.label == "after"]
        return found


def read_answers(payload: dict[str, Any]) -> Answers:
    """The answers of a recorded evaluation."""
    return Answers(
        correct=np.array(payload["correct"], dtype=np.float64),
        stated=np.array([c or 0.0 for c in payload["confidence"]]),
        problems=np.array(payload["problem_ids"]),
        kinds=np.array(payload["strata"]),
        readable=np.array([c is not None for c in payload["confidence"]]),
    )


def of_suite(name: str) -> str:
    """The registry's name of a set of the study's suite; other names are unchanged."""
    own = ("held_out", "probe/")
    return name if name.startswith(own) or "/" in name else f"suite/study/{name}"


def shown_mean(found: Any) -> str:
    """Formats a mean over seeds with half of its 95 % interval."""
    if found is None:
        return "–"
    if found.low is None:
        return f"{found.mean:.3f}"
    return f"{found.mean:.3f} ± {max(found.high - found.mean, found.mean - found.low):.3f}"


def shown_gap(found: Any) -> str:
    """Formats a difference over seeds with its 95 % interval and p-value."""
    if found.low is None:
        return f"{found.mean:+.3f}"
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}] (p {found.p:.3g})"


def markdown(lines: list[list[str]]) -> str:
    """Formats a Markdown table; the first line is its header."""
    head, *rows = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def write(groups: dict[str, Group], missing: list[str]) -> None:
    """Writes the pages and their pictures; the pages list the groups in `missing`."""
    from study_pictures import draw

    PICTURES.mkdir(parents=True, exist_ok=True)
    draw(groups, PICTURES)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    named = {name.removeprefix("study-").replace("-", "_"): group for name, group in groups.items()}
    for name, page in PAGES.items():
        template = environment.from_string((TEMPLATES / name).read_text(encoding="utf-8"))
        text = template.render(named, missing=missing, rescored=read_rescored())
        page.write_text(text, encoding="utf-8")
        print(page.relative_to(ROOT))
