"""Predictors of a right answer that no training of confidences needs, on answers to Countdown.

They read the confidence that the model states anyway, the check that it writes before that, whether
the last sum of its reasoning equals the target, or how many of its other answers agree. What a
predictor fits, it fits on the answers to one half of the problems for the other half.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from rlx_command import rlx
from simple_rules import is_target_reached

from rlx.evaluation import (
    compute_auroc,
    compute_brier,
    compute_debiased_ece,
    compute_within_auroc,
    halve_problems,
    recalibrate_confidences,
)

__all__ = ["RULES", "Answers", "Rule", "compute_rule_figures", "sample_answers"]

PROBLEMS, SAMPLES = 600, 8
"""Held-out problems, and answers to each."""
CLIP = 1e-3
"""Confidences nearer to 0 or 1 are moved there before their log odds are taken."""
CHECK = re.compile(r"<analysis>\s*-?\d+\s*(!?=)")
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answers:
    """Several answers to each of some problems; `n` in all.

    Attributes:
        problems, kinds: `[n]` id and stratum of each answer's problem.
        correct: `[n]` of 0 or 1.
        stated: `[n]` stated confidences, 0 where unreadable.
        checks: `[n]` the model's own check of the result against the target: `=`, `!=`, or empty
            where it writes neither.
        reached: `[n]` whether the last sum of the reasoning equals the target.
        agreeing: `[n]` share of the other answers to the problem that say the same.
    """

    problems: NDArray[np.str_]
    kinds: NDArray[np.str_]
    correct: Floats
    stated: Floats
    checks: NDArray[np.str_]
    reached: NDArray[np.bool_]
    agreeing: Floats

    @classmethod
    def from_stored(cls, stored: Mapping[str, Sequence[Any]]) -> Self:
        """Of what `sample_answers` returns."""
        return cls(
            problems=np.array(stored["problems"]),
            kinds=np.array(stored["kinds"]),
            correct=np.array(stored["correct"], dtype=np.float64),
            stated=np.array([c or 0.0 for c in stored["stated"]]),
            checks=np.array(stored["checks"]),
            reached=np.array(stored["reached"], dtype=bool),
            agreeing=compute_agreement(stored["problems"], stored["said"]),
        )


def sample_answers(run_id: str) -> dict[str, list[Any]]:
    """Has a run's model answer held-out problems, each several times; columns by name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answers.jsonl")
        size = (f"--problems={PROBLEMS}", f"--samples={SAMPLES}")
        rlx("eval", run_id, "--no-record", *size, "--out", str(file), quiet=True)
        answers = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    numbers = {said: n for n, said in enumerate(sorted({a["said"] or "" for a in answers}))}
    return {
        "problems": [a["problem_id"] for a in answers],
        "kinds": [a["stratum"] for a in answers],
        "correct": [a["correct"] for a in answers],
        "stated": [a["confidences"][0] for a in answers],
        "checks": [read_check(a["confidence_texts"][0]) for a in answers],
        "reached": [int(is_target_reached(a)) for a in answers],
        "said": [numbers[a["said"] or ""] for a in answers],
    }


def read_check(text: str) -> str:
    """The sign between result and target in a check such as `17!=99`; empty if there is none."""
    found = CHECK.search(text)
    return found[1] if found else ""


def compute_agreement(problems: Sequence[str], said: Sequence[Hashable]) -> Floats:
    """`[n]` share of the other answers to an answer's problem that say the same.

    A problem with one answer has no others, and its share is 0.
    """
    of_problem, alike = Counter(problems), Counter(zip(problems, said, strict=True))
    others = [max(1, of_problem[problem] - 1) for problem in problems]
    same = [alike[pair] - 1 for pair in zip(problems, said, strict=True)]
    return np.array(same, dtype=np.float64) / np.array(others)


# Predictors --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """A predictor of a right answer.

    Attributes:
        label: name on the page.
        predict: the probabilities `[n]` that it gives to answers.
    """

    label: str
    predict: Callable[[Answers], Floats]


def _state(answers: Answers) -> Floats:
    return answers.stated


def _scale(answers: Answers) -> Floats:
    """σ(logit(c) / T), where T minimises the log loss of the other half."""
    from scipy.optimize import minimize_scalar
    from scipy.special import expit, logit

    odds = logit(np.clip(answers.stated, CLIP, 1 - CLIP))

    def fit(own: NDArray[np.bool_]) -> float:
        y = answers.correct[own]

        def loss(slope: float) -> float:
            p = np.clip(expit(slope * odds[own]), CLIP, 1 - CLIP)
            return float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())

        return float(minimize_scalar(loss, bounds=(0.0, 10.0), method="bounded").x)

    half, found = halve_problems(answers.problems), np.zeros_like(odds)
    for test in (half, ~half):
        found[test] = expit(fit(~test) * odds[test])
    return found


def _map(values: Callable[[Answers], Floats]) -> Callable[[Answers], Floats]:
    """After the increasing map that fits the other half."""

    def predict(answers: Answers) -> Floats:
        mapped = recalibrate_confidences(answers.correct, values(answers), answers.problems)
        assert mapped is not None, "there are at least two problems"
        return mapped

    return predict


def _count(cell: Callable[[Answers], Sequence[Hashable]]) -> Callable[[Answers], Floats]:
    """The share of right answers in the same cell of the other half; of all where it has none."""

    def predict(answers: Answers) -> Floats:
        cells, half = (
            np.array([str(one) for one in cell(answers)]),
            halve_problems(answers.problems),
        )
        found = np.zeros(len(cells))
        for test in (half, ~half):
            y, others = answers.correct[~test], cells[~test]
            shares = {one: y[others == one].mean() for one in np.unique(others)}
            found[test] = [shares.get(one, y.mean()) for one in cells[test]]
        return found

    return predict


RULES = (
    Rule("stated confidence", _state),
    Rule("stated, temperature fitted", _scale),
    Rule("stated, isotonic map fitted", _map(_state)),
    Rule("stated, at least .5 or not", _count(lambda answers: answers.stated >= 0.5)),
    Rule("share of the other answers that agree", lambda answers: answers.agreeing),
    Rule("the same, isotonic map fitted", _map(lambda answers: answers.agreeing)),
    Rule("the model's own check", _count(lambda answers: answers.checks)),
    Rule(
        "the same, by kind of problem",
        _count(lambda answers: list(zip(answers.checks, answers.kinds, strict=True))),
    ),
    Rule("last sum equals the target", _count(lambda answers: answers.reached)),
    Rule(
        "the same, by kind of problem",
        _count(lambda answers: list(zip(answers.reached, answers.kinds, strict=True))),
    ),
    Rule("kind of problem alone", _count(lambda answers: answers.kinds)),
)
"""In the order of the page's rows."""


def compute_rule_figures(rule: Rule, answers: Answers) -> dict[str, float]:
    """The figures of a rule on answers; without those that are not defined."""
    predicted = rule.predict(answers)
    found = {
        "brier": compute_brier(answers.correct, predicted),
        "ece_debiased": compute_debiased_ece(answers.correct, predicted),
        "auroc": compute_auroc(answers.correct, predicted),
        "within_auroc": compute_within_auroc(answers.correct, predicted, answers.kinds),
    }
    return {name: float(value) for name, value in found.items() if value is not None}
