"""Answers to problems of one set, as many to each as were asked for, and what they amount to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlx.evaluation.answer_scaling import AnswerScaling, ProblemAnswers
from rlx.evaluation.calibration import Calibration
from rlx.evaluation.held_out import (
    collect_stated_confidences,
    compute_identical_share,
    find_correctness_reward,
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
from rlx.rollout import RolloutTree

__all__ = ["ScoredAnswer", "compute_answer_metrics", "read_answers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One answer, or rollout, that was scored.

    Attributes:
        problem: its number in the set.
        problem_id, stratum: of the problem.
        sample: its number among the problem's answers.
        text: of its first turn.
        said: what its last `answer` span says, blanks evened; the whole text where there is no
            span; None where that is empty.
        correct: 1 where the correctness reward is exactly 1, else 0.
        confidences: all that were stated for it, nan where unreadable; empty where none is asked.
        rewards: raw values of its turns and of the rollout, by name, means where there are several.
        tokens: that the policy wrote in the first turn.
        truncated: whether that ran out of room.
    """

    problem: int
    problem_id: str
    stratum: str
    sample: int
    text: str
    said: str | None
    correct: int
    confidences: tuple[float, ...]
    rewards: Mapping[str, float]
    tokens: int
    truncated: bool

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; None for a confidence that could not be read."""
        stated = [None if np.isnan(c) else c for c in self.confidences]
        return {**asdict(self), "confidences": stated}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Returns what `to_json` was made from."""
        stated = tuple(float("nan") if c is None else c for c in record["confidences"])
        values = {field.name: record[field.name] for field in fields(cls)}
        return cls(**{**values, "confidences": stated})


def read_answers(
    trees: Sequence[RolloutTree], table: RewardTable, correct: str, *, first: int = 0
) -> list[ScoredAnswer]:
    """Reads off every answer that was scored; dropped ones are left out.

    Args:
        trees: one per problem, in the set's order.
        table: scored by the experiment's own rewards, as in training.
        correct: name of the reward that says whether an answer, or a whole rollout, is correct.
        first: number of the first tree's problem in the set.
    """
    places = [
        (t, s)
        for t, tree in enumerate(trees)
        for s in tree.policy_segments
        if tree.segments[s].turn == 1 and (t, s) not in table.dropped
    ]
    stated = collect_stated_confidences(trees, table, places)
    asked = any(stated)
    found: list[ScoredAnswer] = []
    count: dict[int, int] = {}
    for (t, s), own in zip(places, stated, strict=True):
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
                confidences=tuple(own) if own or not asked else (float("nan"),),
                rewards=_compute_rollout_rewards(tree, table, t, s),
                tokens=len(turn.token_ids),
                truncated=turn.finish_reason == "length",
            )
        )
    return found


def compute_answer_metrics(
    answers: Sequence[ScoredAnswer], *, seed: int, draws: int = DRAWS
) -> dict[str, Any]:
    """Everything that is said of a set, as plain JSON.

    Args:
        answers: at least one.
        seed: of resamples, and of the orders of votes.
        draws: resamples for intervals.

    Returns:
        `n` answers, `problems`, accuracy and calibration over all answers, each answer with the
        first confidence stated for it; `intervals` over problems; `scaling` where every problem
        has several answers; mean `rewards`, `tokens` and the share `truncated`.
    """
    correct = np.array([a.correct for a in answers], dtype=np.float64)
    strata = [a.stratum for a in answers]
    asked = all(a.confidences for a in answers)
    told: dict[str, Any] = {
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
    if asked:
        confidence = np.array([a.confidences[0] for a in answers])
        told |= Calibration.measure(correct, confidence, strata).to_json()
        told["alike_share"] = compute_identical_share([a.confidences for a in answers])
    else:
        told["by_stratum"] = {
            label: {"n": len(own), "accuracy": float(np.mean([a.correct for a in own]))}
            for label in sorted(set(strata) - {""})
            if (own := [a for a in answers if a.stratum == label])
        }
    measures = _build_interval_measures(correct, confidence)
    told["intervals"] = compute_bootstrap_intervals(
        [a.problem_id for a in answers], measures, seed=seed, draws=draws
    )
    problems = _group_problem_answers(answers)
    several = min(len(p.correct) for p in problems) > 1
    told["scaling"] = AnswerScaling.measure(problems, seed=seed).to_json() if several else None
    return told


def _build_interval_measures(
    correct: NDArray[np.float64], confidence: NDArray[np.float64] | None
) -> Any:
    """Figures that get intervals, as functions of the samples that count."""
    measures: dict[str, Any] = {"accuracy": lambda at: float(correct[at].mean())}
    if confidence is None:
        return measures
    stated = np.nan_to_num(confidence, nan=0.0)
    of_pairs = {
        "brier": compute_brier,
        "ece": compute_expected_calibration_error,
        "mce": compute_maximum_calibration_error,
        "auroc": compute_auroc,
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


def _find_final_answer(tree: RolloutTree, first: int) -> str | None:
    """What the rollout that begins with a turn says in the end."""
    end = next(end for end in tree.rollouts if first in tree.turns(end))
    turns = [tree.segments[s] for s in tree.turns(end)]
    spoken = [t.spans["answer"].text for t in turns if "answer" in t.spans]
    text = spoken[-1] if spoken else tree.segments[first].text
    return " ".join(text.split()) or None


def _compute_rollout_rewards(
    tree: RolloutTree, table: RewardTable, t: int, first: int
) -> dict[str, float]:
    ends = [end for end in tree.rollouts if first in tree.turns(end)]
    turns = sorted({s for end in ends for s in tree.turns(end)})
    entries = [table.turns.get((t, s), {}) for s in turns]
    entries += [table.rollouts.get((t, end), {}) for end in ends]
    return _compute_named_means(
        {e.name: e.raw} for found in entries for e in found.values() if e.raw is not None
    )


def _compute_named_means(named: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rewards in named:
        for name, value in rewards.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(raws)) for name, raws in values.items()}
