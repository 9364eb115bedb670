"""What stated confidences know beyond simple rules: one bit of themselves, and a look at the sums.

    python experiments/study/simple_rules.py RUN|GROUP ... [--problems N]

Every run answers its held-out problems again (`rlx eval`). Three predictors of a right answer are
compared: the stated confidence; whether it is at least .5; and whether the last sum of the
reasoning equals the target, which reads no confidence. Prints a Markdown table: each score is the
mean over the runs, each difference has its 95 % bootstrap interval over problems. Brier scores are
those after an increasing map that is fitted on other problems, which gives the rules the best
probabilities for their yes and no; the interval takes the maps as fixed.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlx.evaluation import compute_auroc, compute_bootstrap_intervals, recalibrate_confidences

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "make"))
from rlx_command import rlx
from study import registry

__all__ = ["compare_predictors", "is_target_reached"]

Answers = Sequence[Mapping[str, Any]]
Index = NDArray[np.intp]
LAST_SUM = re.compile(r"=\s*(-?\d+)\s*</think>")
STATED, BRIER = "stated", "Brier, recalibrated"
PREDICTORS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    STATED: lambda answer: answer["confidences"][0] or 0.0,
    "stated, at least .5": lambda answer: float((answer["confidences"][0] or 0.0) >= 0.5),
    "last sum equals target": lambda answer: float(is_target_reached(answer)),
}
SCORES = (BRIER, "AUROC", "AUROC, 2 numbers", "AUROC, 3 numbers")


def is_target_reached(answer: Mapping[str, Any]) -> bool:
    """Whether the result of the last sum in an answer's reasoning is the problem's target."""
    results = LAST_SUM.findall(answer["text"])
    return bool(results) and results[-1] == answer["problem_id"].rpartition("=")[2]


def compare_predictors(runs: Sequence[Answers], draws: int = 1000) -> str:
    """The Markdown table for the answers of some runs, as `rlx eval --out` writes them."""
    scored = [_ScoredRun.from_answers(answers) for answers in runs]
    ends = np.cumsum([0, *map(len, runs)])

    def score(predictor: str, name: str, at: Index) -> float | None:
        """The mean of a score over the runs, at some positions among all answers."""
        found = [
            run.score(predictor, name, at[(begin <= at) & (at < end)] - begin)
            for run, begin, end in zip(scored, ends[:-1], ends[1:], strict=True)
        ]
        values = [value for value in found if value is not None]
        return float(np.mean(values)) if len(values) == len(found) else None

    def difference(rule: str, name: str, at: Index) -> float | None:
        ours, theirs = score(STATED, name, at), score(rule, name, at)
        return None if ours is None or theirs is None else ours - theirs

    whole = np.arange(ends[-1])
    pairs = [(rule, name) for rule in PREDICTORS if rule != STATED for name in SCORES]
    measures = {str(pair): partial(difference, *pair) for pair in pairs}
    problems = [answer["problem_id"] for answers in runs for answer in answers]
    intervals = compute_bootstrap_intervals(problems, measures, seed=0, draws=draws)
    gaps = {
        pair: _write(difference(*pair, whole), intervals[str(pair)], sign="+") for pair in pairs
    }
    rows = [
        ["", *SCORES],
        ["---"] * (1 + len(SCORES)),
        *([p, *(_write(score(p, name, whole)) for name in SCORES)] for p in PREDICTORS),
        *(
            [f"{STATED} − {rule}", *(gaps[rule, name] for name in SCORES)]
            for rule in PREDICTORS
            if rule != STATED
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@dataclass(frozen=True, slots=True)
class _ScoredRun:
    """The answers of one run as arrays, and what each predictor says of them.

    Attributes:
        correct, kinds: `[n]` of 0 or 1; the stratum of each problem.
        predicted, losses: `[n]` by predictor: the prediction, and its squared error after an
            increasing map that is fitted on other problems.
    """

    correct: NDArray[np.float64]
    kinds: NDArray[np.str_]
    predicted: Mapping[str, NDArray[np.float64]]
    losses: Mapping[str, NDArray[np.float64]]

    @classmethod
    def from_answers(cls, answers: Answers) -> Self:
        correct = np.array([answer["correct"] for answer in answers], dtype=np.float64)
        problems = [answer["problem_id"] for answer in answers]
        predicted = {
            name: np.array([predict(answer) for answer in answers])
            for name, predict in PREDICTORS.items()
        }
        mapped = {
            name: recalibrate_confidences(correct, values, problems)
            for name, values in predicted.items()
        }
        return cls(
            correct=correct,
            kinds=np.array([answer["stratum"] for answer in answers]),
            predicted=predicted,
            losses={n: (m - correct) ** 2 for n, m in mapped.items() if m is not None},
        )

    def score(self, predictor: str, name: str, at: Index) -> float | None:
        if name == BRIER:
            return float(self.losses[predictor][at].mean())
        _, _, kind = name.partition(", ")
        own = at[self.kinds[at] == kind] if kind else at
        return compute_auroc(self.correct[own], self.predicted[predictor][own])


def _write(value: float | None, interval: tuple[float, float] | None = None, sign: str = "") -> str:
    if value is None:
        return "–"
    text = f"{value:{sign}.3f}"
    return text if interval is None else f"{text} [{interval[0]:+.3f}, {interval[1]:+.3f}]"


def main() -> None:
    """Evaluates the runs and prints their table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN|GROUP")
    parser.add_argument("--problems", help="held-out problems per run, by default all")
    options = parser.parse_args()
    limit = () if options.problems is None else ("--problems", options.problems)
    with registry() as open_registry:
        ids = [
            run.id
            for name in options.runs
            for run in (open_registry.runs(group=name) or [open_registry.run(name)])
            if run.status == "finished"
        ]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{run_id}.jsonl" for run_id in ids]
        for run_id, file in zip(ids, files, strict=True):
            rlx("eval", run_id, "--no-record", "--out", str(file), *limit, quiet=True)
        answers = [[json.loads(line) for line in file.open(encoding="utf-8")] for file in files]
    n, problems = sum(map(len, answers)), len({a["problem_id"] for own in answers for a in own})
    print(f"{len(ids)} runs, {n} answers to {problems} problems\n\n{compare_predictors(answers)}")


if __name__ == "__main__":
    main()
