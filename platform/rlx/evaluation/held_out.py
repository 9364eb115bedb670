"""Evaluation on held-out problems with one sampled answer each, and its stated confidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.errors import RewardError
from rlx.evaluation.calibration import Calibration
from rlx.plugin import Problem, Task
from rlx.reward import RewardTable
from rlx.rollout import RolloutPlan, RolloutTree

__all__ = [
    "HeldOutResults",
    "collect_stated_confidences",
    "compute_held_out_metrics",
    "compute_identical_share",
    "draw_test_problems",
    "find_correctness_reward",
    "find_stating_turns",
    "get_stated_confidence",
    "limit_to_one_answer",
]


PATIENCE = 1000
"""Draws in a row without a new problem after which a task is taken to have no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResults:
    """Results of a model on held-out problems, per problem.

    Attributes:
        problem_ids: `n` ids; problems whose scorer or environment failed are left out.
        strata: strata of the problems.
        correct: 1 if the answer's correctness reward is exactly 1, else 0.
        confidence: confidence stated for the answer, nan if unparsable; None if no confidence is
            requested, or no answer states one.
        alike: share of answers with several confidences that are all equal; None without any.
        rewards: mean raw value of every reward, by name.
        lost: number of problems left out.
    """

    problem_ids: tuple[str, ...]
    strata: tuple[str, ...]
    correct: tuple[int, ...]
    confidence: tuple[float, ...] | None
    alike: float | None
    rewards: Mapping[str, float]
    lost: int = 0

    def metrics(self) -> dict[str, Any]:
        """Metrics as plain JSON: `n`, `accuracy`, and calibration, None without confidences."""
        base: dict[str, Any] = {
            "n": len(self.correct),
            "problems": len(set(self.problem_ids)),
            "accuracy": float(np.mean(self.correct)),
            "brier": None,
            "ece": None,
            "auroc": None,
            "rewards": dict(self.rewards),
        }
        if self.lost:
            base["lost"] = self.lost
        if self.confidence is None and (strata := sorted(set(self.strata) - {""})):
            base["by_stratum"] = {stratum: self._of(stratum) for stratum in strata}
        if self.confidence is None:
            return base
        calibration = Calibration.measure(
            self.correct, self.confidence, self.strata, self.problem_ids
        )
        return {**base, **calibration.to_json(), "alike_share": self.alike}

    def _of(self, stratum: str) -> dict[str, float]:
        right = [c for c, s in zip(self.correct, self.strata, strict=True) if s == stratum]
        return {"n": len(right), "accuracy": float(np.mean(right))}

    def payload(self) -> dict[str, Any]:
        """The (correct, confidence) pairs as plain JSON; None for an unparsable confidence."""
        confidence = self.confidence
        return {
            "problem_ids": list(self.problem_ids),
            "strata": list(self.strata),
            "correct": list(self.correct),
            "confidence": None
            if confidence is None
            else [None if np.isnan(c) else c for c in confidence],
        }


def draw_test_problems(task: Task, count: int, seed: int, *, distinct: bool) -> list[Problem]:
    """Draws held-out problems, the first `count` of the task.

    Args:
        task: where they come from.
        count: how many.
        seed: the task's seed.
        distinct: skip problems whose id was drawn before. The set ends early once `PATIENCE` draws
            in a row have brought nothing new.
    """
    if not distinct:
        return [task.problem("test", index, seed) for index in range(count)]
    found: dict[str, Problem] = {}
    index = last = 0
    while len(found) < count and index - last <= PATIENCE:
        problem = task.problem("test", index, seed)
        if problem.id not in found:
            found[problem.id] = problem
            last = index
        index += 1
    return list(found.values())


def limit_to_one_answer(plan: RolloutPlan) -> RolloutPlan:
    """The training plan with one answer, or rollout, per problem.

    Levels below the answer keep their sample counts, to measure the spread of confidences. The
    first one counts as the answer's confidence.
    """
    return plan.copy_with_sampling(1)


def compute_held_out_metrics(
    plan: RolloutPlan, trees: Sequence[RolloutTree], table: RewardTable, correct: str
) -> HeldOutResults:
    """Extracts the results from trees with one answer each.

    Args:
        plan: the training plan, or that of the trees.
        trees: sampled from the plan of `limit_to_one_answer`.
        table: rewards of the trees, scored as in training.
        correct: name of the correctness reward, of answers or of whole rollouts.

    Raises:
        RewardError: every problem was dropped.
    """
    places = [
        (t, s)
        for t, tree in enumerate(trees)
        for s in plan.list_answers(tree)[:1]
        if (t, s) not in table.dropped
    ]
    if not places:
        raise RewardError("no held-out problem could be answered and scored: all were dropped")
    answers = [find_correctness_reward(table, trees[t], (t, s), correct) for t, s in places]
    stated = collect_stated_confidences(trees, table, places)
    has_confidences = all(stated)
    return HeldOutResults(
        problem_ids=tuple(trees[t].problem.id for t, _ in places),
        strata=tuple(trees[t].problem.stratum for t, _ in places),
        lost=len(trees) - len(places),
        correct=tuple(int(raw == 1.0) for raw in answers),
        confidence=tuple(c[0] for c in stated) if has_confidences else None,
        alike=compute_identical_share(stated) if has_confidences else None,
        rewards=_compute_reward_means(table),
    )


def find_correctness_reward(
    table: RewardTable, tree: RolloutTree, answer: tuple[int, int], correct: str
) -> float | None:
    """Raw correctness reward of an answer, or of the rollout that contains it; None if absent."""
    own = table.turns.get(answer, {})
    if correct in own:
        return own[correct].raw
    ends = (end for end in tree.rollouts if answer[1] in tree.turns(end))
    entries = table.rollouts.get((answer[0], next(ends, -1)), {})
    return entries[correct].raw if correct in entries else None


def get_stated_confidence(table: RewardTable, place: tuple[int, int]) -> float:
    """The confidence that a reward parsed from a turn (its part `confidence`); nan if none did."""
    for entry in table.turns.get(place, {}).values():
        if "confidence" in entry.parts:
            return float(entry.parts["confidence"])
    return float("nan")


def collect_stated_confidences(
    trees: Sequence[RolloutTree], table: RewardTable, answers: Sequence[tuple[int, int]]
) -> list[list[float]]:
    """Confidences stated for each answer, in the turns that `find_stating_turns` returns.

    Returns:
        A list per answer, nan for an unreadable confidence. All lists are empty if there are no
        confidence turns and no answer states a confidence.
    """
    turns = find_stating_turns(trees, answers)
    found = [[get_stated_confidence(table, place) for place in own] for own in turns]
    own_turns = turns == [[place] for place in answers]
    return [[] for _ in found] if own_turns and np.isnan(found).all() else found


def find_stating_turns(
    trees: Sequence[RolloutTree], answers: Sequence[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Turns that state a confidence of each answer: confidence turns below it, or else the nearest
    one above it, or else, where there are no confidence turns, the answer itself.

    Args:
        trees: trees of one step.
        answers: (tree, segment) of each answer.

    Returns:
        A list of (tree, segment) per answer.
    """
    found: dict[tuple[int, int], list[tuple[int, int]]] = {place: [] for place in answers}
    for t, tree in enumerate(trees):
        for s in tree.policy_segments:
            if tree.segments[s].kind == "confidence":
                above = [(t, turn) for turn in tree.turns(s)[:-1] if (t, turn) in found]
                if above:
                    found[above[-1]].append((t, s))
    for t, answer in () if any(found.values()) else answers:
        before = trees[t].turns(answer)[:-1]
        spoken = [turn for turn in before if trees[t].segments[turn].kind == "confidence"]
        found[t, answer] += [(t, turn) for turn in spoken[-1:]]
    stated = any(found.values())
    return [found[place] if stated else [place] for place in answers]


def compute_identical_share(stated: Sequence[Sequence[float]]) -> float | None:
    """Share of answers with several confidences whose confidences are all equal; None without any.

    A policy with constant confidences can look perfectly calibrated; a share near 1 reveals it.
    """
    several = [group for group in stated if len(group) > 1]
    if not several:
        return None
    # nan differs from itself, but two unparsable confidences count as equal.
    alike = [len({"none" if np.isnan(c) else c for c in group}) == 1 for group in several]
    return float(np.mean(alike))


def _compute_reward_means(table: RewardTable) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for entries in (*table.turns.values(), *table.rollouts.values()):
        for entry in entries.values():
            if entry.raw is not None:
                values.setdefault(entry.name, []).append(entry.raw)
    return {name: float(np.mean(raws)) for name, raws in values.items()}
