"""Scaling with several answers per problem: pass@k, and majority votes with confidences.

Votes count answers by their text. A missing answer (None) has no vote. On a tie the answer that
comes first wins; answers are in random order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlx.evaluation.scores import compute_expected_calibration_error

__all__ = ["AnswerScaling", "ProblemAnswers", "compute_pass_at_k"]

DRAWS = 64
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
    """Votes on one problem, `[DRAWS, K]` each: correctness per rule, and the majority's share."""

    majority: NDArray[np.int64]
    weighted: NDArray[np.int64]
    most_confident: NDArray[np.int64]
    share: NDArray[np.float64]

    @classmethod
    def of(cls, problem: ProblemAnswers, ks: Sequence[int], rng: np.random.Generator) -> Self:
        shape = DRAWS, len(ks)
        majority, weighted, confident = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        share = np.zeros(shape)
        confidence = problem.confidence or (1.0,) * len(problem.correct)
        for draw in range(DRAWS):
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
