"""What several answers to one problem are worth together: pass@k, and votes with confidences.

A vote is about what is said, so answers are counted by their text. No answer (None) has no vote.
Where two answers have as much, the one that was given first wins; answers stand in random order.
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
"""Orders of each problem's answers over which votes are averaged."""


@dataclass(frozen=True, slots=True)
class ProblemAnswers:
    """The answers to one problem, sampled independently.

    Attributes:
        said: what each says, alike for answers that mean the same; None where it says nothing.
        correct: 1 or 0 for each.
        confidence: stated for each, 0 where unreadable; None where none is asked for.
    """

    said: tuple[str | None, ...]
    correct: tuple[int, ...]
    confidence: tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScaling:
    """Accuracy when the best of k answers is taken, by the rule that takes it; one value per k.

    Attributes:
        k: how many answers are looked at.
        pass_at: share of problems of which one of k answers is right: what an oracle takes.
        majority: the answer most often given.
        weighted: the answer with the largest sum of confidences; None without confidences.
        most_confident: the answer with the largest confidence; None likewise.
        vote_share_ece: ECE (10 bins) of the majority's share of the k answers as its confidence.
    """

    k: tuple[int, ...]
    pass_at: tuple[float, ...]
    majority: tuple[float, ...]
    weighted: tuple[float, ...] | None
    most_confident: tuple[float, ...] | None
    vote_share_ece: tuple[float, ...]

    @classmethod
    def measure(cls, problems: Sequence[ProblemAnswers], *, seed: int) -> Self:
        """Measures k = 1, 2, 4, … up to the fewest answers that a problem has.

        Args:
            problems: at least one, each with an answer.
            seed: of the orders in which answers are taken.

        Raises:
            ValueError: a problem has no answer.

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
        """Returns what `to_json` was made from."""
        values: dict[str, Any] = {n: None if v is None else tuple(v) for n, v in record.items()}
        return cls(**values)


def compute_pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n answers, drawn without replacement, hold a correct one.

        1 - C(n - c, k) / C(n, k)

    It is an unbiased estimate of pass@k from n samples.

    Raises:
        ValueError: not 0 <= correct <= n, or not 1 <= k <= n.

    Reference:
        Chen et al., "Evaluating large language models trained on code", 2021, equation 1.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"{correct} correct of {n}, k = {k}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


@dataclass(frozen=True, slots=True)
class _Votes:
    """Of one problem, `[DRAWS, K]` each: which rule is right, and the majority's share."""

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
    """The first answer of those that say what has the largest weight, and that weight."""
    totals: dict[str, float] = {}
    first: dict[str, int] = {}
    for number in taken:
        said = problem.said[number]
        if said is not None:
            totals[said] = totals.get(said, 0.0) + weights[number]
            first.setdefault(said, number)
    if not totals:
        return None, 0.0
    best = max(totals, key=totals.__getitem__)
    return first[best], totals[best]


def _get_winner_correctness(problem: ProblemAnswers, winner: int | None) -> int:
    return 0 if winner is None else problem.correct[winner]
