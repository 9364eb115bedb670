"""Answers to held-out problems: with confidences and rewards, their metrics, and their scaling."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlx.errors import RewardError
from rlx.evaluation.calibration import (
    compute_aurc,
    compute_auroc,
    compute_brier,
    compute_clipped_losses,
    compute_debiased_ece,
    compute_expected_calibration_error,
    compute_maximum_calibration_error,
    compute_one_bit_auroc,
    measure_calibration,
)
from rlx.evaluation.statistics import (
    DRAWS,
    compute_bootstrap_intervals,
    is_readable,
    read_pairs,
)
from rlx.reward import RewardTable
from rlx.rollout import RolloutPlan, RolloutTree

VOTE_ORDERS = 64
"""Random orders of each problem's answers over which votes are averaged."""


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
    """Confidences stated for each answer, nan if unreadable. All lists are empty if there are no
    confidence turns and no answer states a confidence."""
    turns = _find_stating_turns(trees, answers)
    found = [[get_stated_confidence(table, place) for place in own] for own in turns]
    own_turns = turns == [[place] for place in answers]
    return [[] for _ in found] if own_turns and np.isnan(found).all() else found


def _find_stating_turns(
    trees: Sequence[RolloutTree], answers: Sequence[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Turns that state a confidence of each answer: confidence turns below it, else the nearest one
    above it, else, where there are no confidence turns, the answer itself."""
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
    A policy with constant confidences can look perfectly calibrated; a share near 1 reveals it."""
    several = [group for group in stated if len(group) > 1]
    if not several:
        return None
    # nan differs from itself, but two unparsable confidences count as equal.
    alike = [len({"none" if np.isnan(c) else c for c in group}) == 1 for group in several]
    return float(np.mean(alike))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One scored answer or rollout.

    Attributes:
        problem, sample: index of the problem in the set, and of the answer among the problem's.
        text: text of the turn that answers; with an environment, of the first turn.
        said: text of the last `answer` span, or the whole text, with whitespace normalised; None if
            that is empty.
        correct: 1 if the correctness reward is exactly 1, else 0.
        confidences: all confidences stated for it, nan if unreadable; empty if none is requested.
        confidence_texts: texts of the turns that state them; empty if the answer does so itself.
        rewards: raw rewards of its turns and of the rollout, by name; means if there are several.
        tokens: number of tokens that the policy wrote in that turn.
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


def measure_answer_scaling(
    problems: Sequence[Sequence[ScoredAnswer]], *, seed: int
) -> dict[str, Any]:
    """Accuracy of selecting one of k answers, by rule, for k = 1, 2, 4, … up to the smallest number
    of answers of any problem. Votes count answers by their text; a missing answer has no vote, and
    on a tie the answer that comes first wins, over random orders.

    Returns:
        The numbers `k`, and a value per k of `pass_at`, an oracle's; `majority`, of the commonest
        answer; `weighted`, of the answer with the largest sum of confidences, and `most_confident`,
        of that with the largest one, both None without confidences; `vote_share_ece`, the ECE (10
        bins) with the majority's share of the k answers as its confidence.

    Reference:
        Chen et al., "Evaluating large language models trained on code", 2021 (pass@k);
        Wang et al., "Self-consistency improves chain of thought reasoning", 2023 (majority);
        Damani et al., "Beyond binary rewards", 2025 (confidences).
    """
    fewest = min(map(len, problems), default=0)
    if not fewest:
        raise ValueError("a problem without answers")
    ks = sorted({*(2**i for i in range(fewest.bit_length())), fewest})
    rng = np.random.default_rng(seed)
    votes = np.stack([_draw_votes(p, ks, rng) for p in problems], axis=1)
    majority, weighted, confident = (own.mean(axis=(0, 1)).tolist() for own in votes[:3])
    stated = all(answer.confidences for own in problems for answer in own)
    right, share = votes[0].reshape(-1, len(ks)), votes[3].reshape(-1, len(ks))
    passed = [
        [compute_pass_at_k(len(own), sum(a.correct for a in own), k) for own in problems]
        for k in ks
    ]
    return {
        "k": ks,
        "pass_at": [float(np.mean(own)) for own in passed],
        "majority": majority,
        "weighted": weighted if stated else None,
        "most_confident": confident if stated else None,
        "vote_share_ece": [
            compute_expected_calibration_error(right[:, i], share[:, i]) for i in range(len(ks))
        ],
    }


def compute_pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n answers, drawn without replacement, include a correct one: an
    unbiased estimate of pass@k from n samples.

        1 - C(n - c, k) / C(n, k)

    Reference:
        Chen et al., "Evaluating large language models trained on code", 2021, equation 1.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"{correct} correct of {n}, k = {k}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def _draw_votes(
    answers: Sequence[ScoredAnswer], ks: Sequence[int], rng: np.random.Generator
) -> NDArray[np.float64]:
    """`[4, VOTE_ORDERS, K]`: whether the majority, the vote weighted by confidence and the most
    confident answer are right; and the majority's share of the answers."""
    alike = (1.0,) * len(answers)
    confidence: Sequence[float] = alike
    if all(a.confidences for a in answers):
        confidence = [float(np.nan_to_num(a.confidences[0])) for a in answers]

    def is_right(winner: int | None) -> int:
        return 0 if winner is None else answers[winner].correct

    votes = np.zeros((4, VOTE_ORDERS, len(ks)))
    for draw in range(VOTE_ORDERS):
        order = rng.permutation(len(answers)).tolist()
        for i, k in enumerate(ks):
            taken = order[:k]
            majority, count = _find_vote_winner(answers, taken, alike)
            weighted, _ = _find_vote_winner(answers, taken, confidence)
            confident = max(taken, key=confidence.__getitem__)
            right = (is_right(majority), is_right(weighted), is_right(confident))
            votes[:, draw, i] = (*right, count / k)
    return votes


def _find_vote_winner(
    answers: Sequence[ScoredAnswer], taken: Sequence[int], weights: Sequence[float]
) -> tuple[int | None, float]:
    """Index of the first answer with the winning text, and the total weight of that text."""
    totals: dict[str, float] = {}
    first: dict[str, int] = {}
    for number in taken:
        said = answers[number].said
        if said is not None:
            totals[said] = totals.get(said, 0.0) + weights[number]
            first.setdefault(said, number)
    if not totals:
        return None, 0.0
    best = max(totals, key=totals.__getitem__)
    return first[best], totals[best]


def read_answers(
    plan: RolloutPlan,
    trees: Sequence[RolloutTree],
    table: RewardTable,
    correct: str,
    *,
    most: int | None = None,
) -> list[ScoredAnswer]:
    """Extracts every scored answer; dropped answers are left out.

    Args:
        trees: one tree per problem, in the set's order, scored as in training.
        correct: name of the correctness reward, of answers or of whole rollouts.
        most: number of answers that are taken of each problem; None takes all.
    """
    places = [
        (t, s)
        for t, tree in enumerate(trees)
        for s in plan.list_answers(tree)[:most]
        if (t, s) not in table.dropped
    ]
    stated = collect_stated_confidences(trees, table, places)
    turns = _find_stating_turns(trees, places)
    has_confidences = any(stated)
    found: list[ScoredAnswer] = []
    count: dict[int, int] = {}
    for (t, s), own, stating in zip(places, stated, turns, strict=True):
        tree, turn = trees[t], trees[t].segments[s]
        # The last turn of the rollout, not of what continues it.
        end = max(last for last in tree.policy_segments if s in tree.own_turns(last)[0])
        spans = [tree.segments[one].spans for one in tree.turns(end)]
        spoken = [own_spans["answer"].text for own_spans in spans if "answer" in own_spans]
        said = spoken[-1] if spoken else turn.text
        entries = [table.turns.get((t, one), {}) for one in tree.turns(end)]
        entries.append(table.rollouts.get((t, end), {}))
        number = count[t] = count.get(t, -1) + 1
        found.append(
            ScoredAnswer(
                problem=t,
                problem_id=tree.problem.id,
                stratum=tree.problem.stratum,
                sample=number,
                text=turn.text,
                said=" ".join(said.split()) or None,
                correct=int(find_correctness_reward(table, tree, (t, s), correct) == 1.0),
                confidences=tuple(own) if own or not has_confidences else (float("nan"),),
                confidence_texts=tuple(
                    trees[tree_number].segments[segment].text
                    for tree_number, segment in stating
                    if segment != s
                ),
                rewards=_compute_named_means(
                    {e.name: e.raw}
                    for found_entries in entries
                    for e in found_entries.values()
                    if e.raw is not None
                ),
                tokens=len(turn.token_ids),
                truncated=turn.finish_reason == "length",
            )
        )
    return found


def compute_held_out_metrics(
    plan: RolloutPlan, trees: Sequence[RolloutTree], table: RewardTable, correct: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Computes the metrics of trees with one answer each, sampled with
    `plan.copy_with_sampling(1)`, as plain JSON.

    Returns:
        `n`, `problems`, accuracy and calibration, mean `rewards`, and how many problems were `lost`
        because their scorer or environment failed, if any; and what `build_pairs` returns.

    Raises:
        RewardError: every problem was dropped.
    """
    answers = read_answers(plan, trees, table, correct, most=1)
    if not answers:
        raise RewardError("no held-out problem could be answered and scored: all were dropped")
    entries = (
        entry for own in (*table.turns.values(), *table.rollouts.values()) for entry in own.values()
    )
    metrics = _measure_answers(answers) | {
        "problems": len({a.problem_id for a in answers}),
        "rewards": _compute_named_means({e.name: e.raw} for e in entries if e.raw is not None),
    }
    if lost := len(trees) - len(answers):
        metrics["lost"] = lost
    return metrics, build_pairs(answers)


def build_pairs(answers: Sequence[ScoredAnswer]) -> dict[str, Any]:
    """The (correct, confidence) pairs as plain JSON, with the first `confidence` of each answer,
    None where unreadable; or None if none is requested."""
    stated = [a.to_json()["confidences"] for a in answers]
    return {
        "problem_ids": [a.problem_id for a in answers],
        "strata": [a.stratum for a in answers],
        "correct": [a.correct for a in answers],
        "confidence": [c[0] for c in stated] if all(stated) else None,
    }


def compute_answer_metrics(
    answers: Sequence[ScoredAnswer], *, seed: int, draws: int = DRAWS
) -> dict[str, Any]:
    """Computes all metrics of a set of at least one answer, as plain JSON: those of
    `measure_calibration` with each answer's first confidence, `intervals` over problems, `scaling`
    if every problem has several answers, else None, mean `rewards` and `tokens`, and the share
    `truncated`."""
    problems: dict[int, list[ScoredAnswer]] = {}
    for answer in answers:
        problems.setdefault(answer.problem, []).append(answer)
    several = min(map(len, problems.values())) > 1
    return _measure_answers(answers) | {
        "problems": len(problems),
        "rewards": _compute_named_means(a.rewards for a in answers),
        "tokens": float(np.mean([a.tokens for a in answers])),
        "truncated": float(np.mean([a.truncated for a in answers])),
        "intervals": compute_intervals(build_pairs(answers), seed=seed, draws=draws),
        "scaling": measure_answer_scaling([*problems.values()], seed=seed) if several else None,
    }


def _measure_answers(answers: Sequence[ScoredAnswer]) -> dict[str, Any]:
    """Accuracy and calibration, which is None where no confidences are stated or too few
    readable."""
    correct, strata = [a.correct for a in answers], [a.stratum for a in answers]
    metrics: dict[str, Any] = {"n": len(answers), "accuracy": float(np.mean(correct))}
    first = [a.confidences[0] for a in answers if a.confidences]
    if len(first) == len(answers):
        unparsable = sum(map(math.isnan, first))
        metrics |= {"unparsable": unparsable, "readable_share": 1 - unparsable / len(answers)}
    if len(first) == len(answers) and is_readable(first):
        ids = [a.problem_id for a in answers]
        alike = compute_identical_share([a.confidences for a in answers])
        return {**measure_calibration(correct, first, strata, ids), "alike_share": alike}
    parts = {s: [a.correct for a in answers if a.stratum == s] for s in sorted({*strata} - {""})}
    by_stratum = {s: {"n": len(y), "accuracy": float(np.mean(y))} for s, y in parts.items()}
    return metrics | {"brier": None, "ece": None, "auroc": None, "by_stratum": by_stratum}


def compute_intervals(
    pairs: Mapping[str, Any],
    names: Collection[str] | None = None,
    *,
    seed: int = 0,
    draws: int = DRAWS,
) -> dict[str, tuple[float, float] | None]:
    """95 % intervals over problems of an evaluation's metrics, or of those with some names, from
    what `build_pairs` returns and evaluations record; without it there are none."""
    if (read := read_pairs(pairs)) is None:
        return {}
    correct, found = read
    measures: dict[str, Any] = {"accuracy": lambda at: float(correct[at].mean())}
    if (stated := found) is not None:
        of_pairs: dict[str, Any] = {
            "brier": compute_brier,
            "ece": compute_expected_calibration_error,
            "ece_debiased": compute_debiased_ece,
            "mce": compute_maximum_calibration_error,
            "auroc": compute_auroc,
            "auroc_one_bit": compute_one_bit_auroc,
            "aurc": compute_aurc,
        }
        for name, function in of_pairs.items():
            measures[name] = lambda at, function=function: function(correct[at], stated[at])
        losses = compute_clipped_losses(correct, stated)
        measures["nll"] = lambda at: float(losses[at].mean())
        measures["mean_confidence"] = lambda at: float(stated[at].mean())
        measures["signed_gap"] = lambda at: float((stated[at] - correct[at]).mean())
    wanted = {name: one for name, one in measures.items() if names is None or name in names}
    return compute_bootstrap_intervals(pairs["problem_ids"], wanted, seed=seed, draws=draws)


def _compute_named_means(named: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rewards in named:
        for name, value in rewards.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(raws)) for name, raws in values.items()}
