"""Scored answers to the problems of one held-out set, and their metrics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlx.evaluation.answer_scaling import AnswerScaling, ProblemAnswers
from rlx.evaluation.calibration import Calibration
from rlx.evaluation.corrected import compute_debiased_ece, compute_one_bit_auroc
from rlx.evaluation.held_out import (
    collect_stated_confidences,
    compute_identical_share,
    find_correctness_reward,
    find_stating_turns,
)
from rlx.evaluation.intervals import DRAWS, Index, compute_bootstrap_intervals
from rlx.evaluation.scores import (
    compute_auroc,
    compute_brier,
    compute_clipped_losses,
    compute_expected_calibration_error,
    compute_maximum_calibration_error,
)
from rlx.evaluation.selective import compute_aurc
from rlx.reward import RewardTable
from rlx.rollout import RolloutPlan, RolloutTree

__all__ = ["ScoredAnswer", "compute_answer_metrics", "read_answers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One scored answer or rollout.

    Attributes:
        problem: index of the problem in the set.
        problem_id, stratum: id and stratum of the problem.
        sample: index among the problem's answers.
        text: text of the turn that answers; with an environment, of the first turn.
        said: text of the last `answer` span with whitespace normalised; the whole text if there is
            no span; None if that is empty.
        correct: 1 if the correctness reward is exactly 1, else 0.
        confidences: all confidences stated for it, nan if unreadable; empty if none is requested.
        confidence_texts: texts of the turns that state them; empty if the answer does so itself.
        rewards: raw rewards of its turns and of the rollout, by name; means if there are several.
        tokens: number of tokens that the policy wrote in that turn.
        truncated: whether that turn reached its token limit.
    """

    problem: int
    problem_id: str
    stratum: str
    sample: int
    text: str
    said: str | None
    correct: int
    confidences: tuple[float, ...]
    confidence_texts: tuple[str, ...]
    rewards: Mapping[str, float]
    tokens: int
    truncated: bool

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; None for an unreadable confidence."""
        stated = [None if np.isnan(c) else c for c in self.confidences]
        return {**asdict(self), "confidences": stated}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        stated = tuple(float("nan") if c is None else c for c in record["confidences"])
        values = {field.name: record[field.name] for field in fields(cls)}
        texts = tuple(record["confidence_texts"])
        return cls(**{**values, "confidences": stated, "confidence_texts": texts})


def read_answers(
    plan: RolloutPlan,
    trees: Sequence[RolloutTree],
    table: RewardTable,
    correct: str,
    *,
    first: int = 0,
) -> list[ScoredAnswer]:
    """Extracts every scored answer; dropped answers are left out.

    Args:
        plan: that of the trees.
        trees: one tree per problem, in the set's order.
        table: rewards of the trees, scored as in training.
        correct: name of the correctness reward, of answers or of whole rollouts.
        first: index of the first tree's problem in the set.
    """
    places = [
        (t, s)
        for t, tree in enumerate(trees)
        for s in plan.list_answers(tree)
        if (t, s) not in table.dropped
    ]
    stated = collect_stated_confidences(trees, table, places)
    turns = find_stating_turns(trees, places)
    has_confidences = any(stated)
    found: list[ScoredAnswer] = []
    count: dict[int, int] = {}
    for (t, s), own, stating in zip(places, stated, turns, strict=True):
        tree, turn = trees[t], trees[t].segments[s]
        number = count[t] = count.get(t, -1) + 1
        found.append(
            ScoredAnswer(
                problem=first + t,
                problem_id=tree.problem.id,
                stratum=tree.problem.stratum,
                sample=number,
                text=turn.text,
                said=_find_final_answer(tree, s),
                correct=int(find_correctness_reward(table, tree, (t, s), correct) == 1.0),
                confidences=tuple(own) if own or not has_confidences else (float("nan"),),
                confidence_texts=tuple(
                    trees[tree_number].segments[segment].text
                    for tree_number, segment in stating
                    if segment != s
                ),
                rewards=_compute_rollout_rewards(tree, table, t, s),
                tokens=len(turn.token_ids),
                truncated=turn.finish_reason == "length",
            )
        )
    return found


def compute_answer_metrics(
    answers: Sequence[ScoredAnswer], *, seed: int, draws: int = DRAWS
) -> dict[str, Any]:
    """Computes all metrics of a set, as plain JSON.

    Args:
        answers: at least one.
        seed: seed of the bootstrap and of the vote orders.
        draws: number of bootstrap resamples.

    Returns:
        `n` answers, `problems`, accuracy and calibration over all answers, with the first stated
        confidence of each answer; `intervals` over problems; `scaling` if every problem has several
        answers, else None; mean `rewards` and `tokens`, and the share `truncated`.
    """
    correct = np.array([a.correct for a in answers], dtype=np.float64)
    strata = [a.stratum for a in answers]
    has_confidences = all(a.confidences for a in answers)
    metrics: dict[str, Any] = {
        "n": len(answers),
        "problems": len({a.problem for a in answers}),
        "accuracy": float(correct.mean()),
        "brier": None,
        "ece": None,
        "auroc": None,
        "rewards": _compute_named_means(a.rewards for a in answers),
        "tokens": float(np.mean([a.tokens for a in answers])),
        "truncated": float(np.mean([a.truncated for a in answers])),
    }
    confidence = None
    if has_confidences:
        confidence = np.array([a.confidences[0] for a in answers])
        metrics |= Calibration.measure(
            correct, confidence, strata, [a.problem_id for a in answers]
        ).to_json()
        metrics["alike_share"] = compute_identical_share([a.confidences for a in answers])
    else:
        metrics["by_stratum"] = {
            label: {"n": len(own), "accuracy": float(np.mean([a.correct for a in own]))}
            for label in sorted(set(strata) - {""})
            if (own := [a for a in answers if a.stratum == label])
        }
    measures = _build_interval_measures(correct, confidence)
    metrics["intervals"] = compute_bootstrap_intervals(
        [a.problem_id for a in answers], measures, seed=seed, draws=draws
    )
    problems = _group_problem_answers(answers)
    several = min(len(p.correct) for p in problems) > 1
    metrics["scaling"] = AnswerScaling.measure(problems, seed=seed).to_json() if several else None
    return metrics


def _build_interval_measures(
    correct: NDArray[np.float64], confidence: NDArray[np.float64] | None
) -> Any:
    """Metrics that get intervals, as functions of resampled positions."""
    measures: dict[str, Any] = {"accuracy": lambda at: float(correct[at].mean())}
    if confidence is None:
        return measures
    stated = np.nan_to_num(confidence, nan=0.0)
    of_pairs = {
        "brier": compute_brier,
        "ece": compute_expected_calibration_error,
        "ece_debiased": compute_debiased_ece,
        "mce": compute_maximum_calibration_error,
        "auroc": compute_auroc,
        "auroc_one_bit": compute_one_bit_auroc,
        "aurc": compute_aurc,
    }

    def compute_measure(function: Any, at: Index) -> float | None:
        found: float | None = function(correct[at], stated[at])
        return found

    measures |= {name: partial(compute_measure, function) for name, function in of_pairs.items()}
    losses = compute_clipped_losses(correct, stated)
    measures["nll"] = lambda at: float(losses[at].mean())
    measures["mean_confidence"] = lambda at: float(stated[at].mean())
    measures["signed_gap"] = lambda at: float((stated[at] - correct[at]).mean())
    return measures


def _group_problem_answers(answers: Sequence[ScoredAnswer]) -> list[ProblemAnswers]:
    problems: dict[int, list[ScoredAnswer]] = {}
    for answer in answers:
        problems.setdefault(answer.problem, []).append(answer)
    return [
        ProblemAnswers(
            said=tuple(a.said for a in own),
            correct=tuple(a.correct for a in own),
            confidence=tuple(float(np.nan_to_num(a.confidences[0])) for a in own)
            if all(a.confidences for a in own)
            else None,
        )
        for own in problems.values()
    ]


def _find_end(tree: RolloutTree, first: int) -> int:
    """The last turn of the rollout of which `first` is a turn, not of what continues it."""
    return max(s for s in tree.policy_segments if first in tree.own_turns(s)[0])


def _find_final_answer(tree: RolloutTree, first: int) -> str | None:
    """The final answer of the rollout that has the turn `first`."""
    turns = [tree.segments[s] for s in tree.turns(_find_end(tree, first))]
    spoken = [t.spans["answer"].text for t in turns if "answer" in t.spans]
    text = spoken[-1] if spoken else tree.segments[first].text
    return " ".join(text.split()) or None


def _compute_rollout_rewards(
    tree: RolloutTree, table: RewardTable, t: int, first: int
) -> dict[str, float]:
    end = _find_end(tree, first)
    entries = [table.turns.get((t, s), {}) for s in tree.turns(end)]
    entries.append(table.rollouts.get((t, end), {}))
    return _compute_named_means(
        {e.name: e.raw} for found in entries for e in found.values() if e.raw is not None
    )


def _compute_named_means(named: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rewards in named:
        for name, value in rewards.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(raws)) for name, raws in values.items()}
