"""The expected score of a stated confidence, summed over the values that it can take."""

import math
from dataclasses import dataclass

from torch import Tensor

from rlx.spec import ProperScore

__all__ = ["ExpectedScores", "compute_expected_score_loss", "compute_proper_scores"]

LEAST = 0.001
"""The log score treats probabilities below this one as equal to it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpectedScores:
    """What a step's batch says about the stated confidences of `N` of its rows.

    Attributes:
        values: the `V` texts that a confidence can be.
        rows: `[N]` int64 rows of the batch.
        starts: `[N]` int64 position of the confidence's first token in its row.
        scores: `[N, V]` score of each value under the row's label.
        tokens: `[B, T]` bool tokens of these confidences, which get no sampled credit.
        coefficient: multiplies the term.
    """

    values: tuple[str, ...]
    rows: Tensor
    starts: Tensor
    scores: Tensor
    tokens: Tensor
    coefficient: float


def compute_proper_scores(values: Tensor, labels: Tensor, score: ProperScore) -> Tensor:
    """`[N, V]` score of stating each value under each label.

        brier:      1 - (y - v)²
        log:        1 - ln max(p, .001) / ln .001        p = v if y = 1, 1 - v if y = 0
        spherical:  p / √(v² + (1 - v)²)

    Its expectation over labels is greatest at v = P(y = 1). All lie in [0, 1], so a response
    without any of the values, which scores 0, is never better than one of them. For a label between
    0 and 1, log and spherical average both outcomes, with y the weight of the first.

    Args:
        values: `[V]` in [0, 1].
        labels: `[N]` in [0, 1].
        score: one of the rules above.

    Raises:
        ValueError: a value or a label lies outside [0, 1].

    Reference:
        Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", 2007.

    Example:
        >>> compute_proper_scores(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1.0]), "brier")
        tensor([[0.0000, 0.7500, 1.0000]])
    """
    for name, tensor in (("values", values), ("labels", labels)):
        if not ((tensor >= 0) & (tensor <= 1)).all():
            raise ValueError(f"{name} must lie in [0, 1], got {tensor.tolist()}")
    v, y = values[None, :], labels[:, None]
    if score == "brier":
        return 1 - (y - v).square()
    if score == "log":
        right, wrong = (1 - p.clamp(min=LEAST).log() / math.log(LEAST) for p in (v, 1 - v))
    else:
        length = (v.square() + (1 - v).square()).sqrt()
        right, wrong = v / length, (1 - v) / length
    return y * right + (1 - y) * wrong


def compute_expected_score_loss(logprobs: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
    """`[]` minus the weighted expected scores of some values of some rows.

        ℓ = -Σᵢᵥ wᵢ · πᵢ(v) · score(v, yᵢ)

    It is a sum over values, so the values of a row may be divided between micro-batches. Its
    gradient is the expectation over v of the sampled one, wᵢ · score · ∇ log πᵢ(v), without its
    variance.

    Args:
        logprobs: `[R]` nats, log πᵢ(v): the sum over the tokens of one value in one row.
        scores: `[R]` its score.
        weights: `[R]` weight of its row.
    """
    loss: Tensor = -(weights * scores * logprobs.exp()).sum()
    return loss
