"""Writes docs/study.md and its pictures from the registry.

The text is experiments/study/page.md, a Jinja template that refers to every number by name.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from study_rescore import read_rescored

from rlx.comparison import Comparison, ComparisonRow, SuiteDifferences, compare_recipes
from rlx.evaluation import compute_expected_calibration_error, compute_seed_mean
from rlx_registry import Registry

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "experiments" / "study" / "page.md"
PAGE = ROOT / "docs" / "study.md"
PICTURES = ROOT / "docs" / "study"
HEADS = {
    "accuracy": "accuracy",
    "mean_confidence": "stated",
    "brier": "Brier",
    "ece": "ECE",
    "auroc": "AUROC",
    "within_auroc": "AUROC within kinds",
    "alike_share": "all alike",
}
WITHIN = ("accuracy", "mean_confidence", "brier", "ece", "auroc")
"""Metrics available for every kind of problem."""


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

    def by_problem(self, suite: str) -> SuiteDifferences:
        """Differences from the first recipe, problem by problem."""
        (found,) = [pairs for pairs in self.compared.by_problem if pairs.suite == suite]
        return found

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
        pairs = self.by_problem(suite).differences
        for n, label in list(enumerate(self.labels))[1:]:
            lines.append([f"{label} − {first}, over seeds"])
            for metric in metrics:
                gap = self.row(suite, metric).differences[n]
                lines[-1].append("–" if gap is None else shown_gap(gap))
            lines.append([f"{label} − {first}, by problem"])
            for metric in metrics:
                one = (pairs[n] or {}).get(metric)
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
    return f"{found.mean:.3f} ± {(found.high - found.low) / 2:.3f}"


def shown_gap(found: Any) -> str:
    """Formats a difference over seeds with its 95 % interval and p-value."""
    over = found.over
    if over.low is None:
        return f"{over.mean:+.3f}"
    return f"{over.mean:+.3f} [{over.low:+.3f}, {over.high:+.3f}] (p {found.p:.2g})"


def markdown(lines: list[list[str]]) -> str:
    """Formats a Markdown table; the first line is its header."""
    head, *rows = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def write(groups: dict[str, Group], missing: list[str]) -> None:
    """Writes the page and its pictures; the page lists the groups in `missing`."""
    from study_pictures import draw

    PICTURES.mkdir(parents=True, exist_ok=True)
    draw(groups, PICTURES)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    named = {name.removeprefix("study-").replace("-", "_"): group for name, group in groups.items()}
    page = template.render(named, missing=missing, rescored=read_rescored())
    PAGE.write_text(page, encoding="utf-8")
    print(PAGE.relative_to(ROOT))
