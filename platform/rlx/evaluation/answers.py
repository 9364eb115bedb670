"""Answers to held-out problems: with confidences and rewards, their metrics, and their scaling.

With several answers per problem there are pass@k, and majority votes with confidences. Votes count
answers by their text. A missing answer (None) has no vote. On a tie the answer that comes first
wins; answers are in random order.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlx.errors import RewardError
from rlx.evaluation.calibration import Calibration
from rlx.evaluation.scores import (
    compute_aurc,
    compute_auroc,
    compute_brier,
    compute_clipped_losses,
    compute_debiased_ece,
    compute_expected_calibration_error,
    compute_maximum_calibration_error,
    compute_one_bit_auroc,
)
from rlx.evaluation.statistics import DRAWS, Index, compute_bootstrap_intervals
from rlx.plugin import Problem, Task
from rlx.reward import RewardTable
from rlx.rollout import RolloutPlan, RolloutTree

MOST_REPEATS = 1000
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
        distinct: skip problems whose id was drawn before. The set ends early once
            `MOST_REPEATS` draws in a row have brought nothing new.
    """
    if not distinct:
        return [task.problem("test", index, seed) for index in range(count)]
    found: dict[str, Problem] = {}
    index = last = 0
    while len(found) < count and index - last <= MOST_REPEATS:
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


VOTE_ORDERS = 64
"""Random orders of each problem's answers over which votes are averaged."""


@dataclass(frozen=True, slots=True)
class ProblemAnswers:
    """The answers to one problem, sampled independently.

    Attributes:
        said: normalised text of each answer, equal for answers that mean the same; None if empty.
        correct: 1 or 0 for each answer.
        confidence: stated confidence of each answer, 0 if unreadable; None if none is requested.
    """

    said: tuple[str | None, ...]
    correct: tuple[int, ...]
    confidence: tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScaling:
    """Accuracy of selecting one of k answers, per selection rule; one value per k.

    Attributes:
        k: numbers of answers.
        pass_at: pass@k, the accuracy of an oracle that picks a correct answer if there is one.
        majority: accuracy of the most frequent answer.
        weighted: accuracy of the answer with the largest sum of confidences; None without
            confidences.
        most_confident: accuracy of the answer with the largest confidence; None without
            confidences.
        vote_share_ece: ECE (10 bins) with the majority's share of the k answers as its confidence.
    """

    k: tuple[int, ...]
    pass_at: tuple[float, ...]
    majority: tuple[float, ...]
    weighted: tuple[float, ...] | None
    most_confident: tuple[float, ...] | None
    vote_share_ece: tuple[float, ...]

    @classmethod
    def measure(cls, problems: Sequence[ProblemAnswers], *, seed: int) -> Self:
        """Measures k = 1, 2, 4, … up to the smallest number of answers of any problem.

        Args:
            problems: at least one problem, each with at least one answer.
            seed: seed of the random orders of the answers.

        Raises:
            ValueError: there is no problem, or a problem has no answer.

        Reference:
            Chen et al., "Evaluating large language models trained on code", 2021 (pass@k);
            Wang et al., "Self-consistency improves chain of thought reasoning", 2023 (majority);
            Damani et al., "Beyond binary rewards", 2025 (confidences).
        """
        fewest = min((len(p.correct) for p in problems), default=0)
        if not fewest:
            raise ValueError("a problem without answers")
        ks = tuple(sorted({*(2**i for i in range(fewest.bit_length())), fewest}))
        rng = np.random.default_rng(seed)
        stated = all(p.confidence is not None for p in problems)
        votes = [_Votes.of(p, ks, rng) for p in problems]
        mean = {
            name: tuple(float(x) for x in np.mean([getattr(v, name) for v in votes], axis=(0, 1)))
            for name in ("majority", "weighted", "most_confident")
        }
        shares, right = (np.stack([getattr(v, n) for v in votes]) for n in ("share", "majority"))
        return cls(
            k=ks,
            pass_at=tuple(
                float(
                    np.mean(
                        [compute_pass_at_k(len(p.correct), sum(p.correct), k) for p in problems]
                    )
                )
                for k in ks
            ),
            majority=mean["majority"],
            weighted=mean["weighted"] if stated else None,
            most_confident=mean["most_confident"] if stated else None,
            vote_share_ece=tuple(
                compute_expected_calibration_error(right[..., i].ravel(), shares[..., i].ravel())
                for i in range(len(ks))
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        values: dict[str, Any] = {n: None if v is None else tuple(v) for n, v in record.items()}
        return cls(**values)


def compute_pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n answers, drawn without replacement, include a correct one.

        1 - C(n - c, k) / C(n, k)

    It is an unbiased estimate of pass@k from n samples.

    Raises:
        ValueError: not 0 <= correct <= n, or not 1 <= k <= n.

    Reference:
        Chen et al., "Evaluating large language models trained on code", 2021, equation 1.

    Example:
        >>> compute_pass_at_k(4, 1, 2)
        0.5
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"{correct} correct of {n}, k = {k}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


@dataclass(frozen=True, slots=True)
class _Votes:
    """Votes on one problem, `[VOTE_ORDERS, K]` each: correctness per rule; the majority's share."""

    majority: NDArray[np.int64]
    weighted: NDArray[np.int64]
    most_confident: NDArray[np.int64]
    share: NDArray[np.float64]

    @classmethod
    def of(cls, problem: ProblemAnswers, ks: Sequence[int], rng: np.random.Generator) -> Self:
        shape = VOTE_ORDERS, len(ks)
        majority, weighted, confident = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        share = np.zeros(shape)
        confidence = problem.confidence or (1.0,) * len(problem.correct)
        for draw in range(VOTE_ORDERS):
            order = rng.permutation(len(problem.correct)).tolist()
            for i, k in enumerate(ks):
                taken = order[:k]
                winner, votes = _find_vote_winner(problem, taken, (1.0,) * len(confidence))
                majority[draw, i], share[draw, i] = (
                    _get_winner_correctness(problem, winner),
                    votes / k,
                )
                weighted[draw, i] = _get_winner_correctness(
                    problem, _find_vote_winner(problem, taken, confidence)[0]
                )
                confident[draw, i] = problem.correct[max(taken, key=confidence.__getitem__)]
        return cls(majority, weighted, confident, share)


def _find_vote_winner(
    problem: ProblemAnswers, taken: Sequence[int], weights: Sequence[float]
) -> tuple[int | None, float]:
    """Index of the first answer with the winning text, and the total weight of that text."""
    totals: dict[str, float] = {}
    first: dict[str, int] = {}
    for number in taken:
        answer = problem.said[number]
        if answer is not None:
            totals[answer] = totals.get(answer, 0.0) + weights[number]
            first.setdefault(answer, number)
    if not totals:
        return None, 0.0
    best = max(totals, key=totals.__getitem__)
    return first[best], totals[best]


def _get_winner_correctness(problem: ProblemAnswers, winner: int | None) -> int:
    return 0 if winner is None else problem.correct[winner]


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
