"""The value loss, and the aggregation weights."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.spec import Aggregate, ProperScore

ETA = 1e-8
"""η, added to the number of tokens, so that a fully masked batch has loss 0."""


# Critic -----------------------------------------------------------------------------------------
def value_loss(
    values: Tensor, old_values: Tensor | None, returns: Tensor, *, clip: float | None
) -> Tensor:
    """Token losses of a critic, optionally clipped around its old values.

        ℓₜ = ½ max((Vₜ - Rₜ)², (clip(Vₜ, V_old - c, V_old + c) - Rₜ)²)

    Args:
        values: `[...]` Vₜ.
        old_values: `[...]` values from which the returns were computed; read only with a clip.
        returns: `[...]` Rₜ.
        clip: c, or None for the plain square.

    Returns:
        `[...]` losses, not yet averaged.

    Raises:
        ValueError: a clip is set without old values.

    Reference:
        Schulman et al., PPO, arXiv 1707.06347, as its authors implemented it (`ppo2`).
    """
    loss = (values - returns).square()
    if clip is not None:
        if old_values is None:
            raise ValueError("a value clip needs old_values")
        near = torch.clamp(values, old_values - clip, old_values + clip)
        loss = torch.maximum(loss, (near - returns).square())
    return loss / 2


# Aggregation ------------------------------------------------------------------------------------
def aggregation_weights(
    mask: Tensor,
    kinds: Tensor,
    *,
    aggregate: Aggregate,
    per_turn: bool,
    constant_lengths: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """`[B, T]` weights that turn token losses into the step's loss.

        token_mean:     wᵢₜ = mᵢₜ / (Σ m + η)                        BNPO, DAPO, RLCR in two turns
        sequence_mean:  wᵢₜ = mᵢₜ / (Σₜ mᵢₜ · rows)                   GRPO
        sequence_sum:   wᵢₜ = mᵢₜ / rows
        constant:       wᵢₜ = mᵢₜ / (L · rows)                       Dr. GRPO
        per_turn:       sums and counts run over rows of one kind, and the kinds are added

    Args:
        mask: `[B, T]` bool tokens that learn, of the whole optimiser step.
        kinds: `[B]` int64 rows with equal numbers are the same kind of turn.
        aggregate: one of the rules above.
        per_turn: average within each kind.
        constant_lengths: `[B]` L of each row; for "constant" only.
        counted: `[B]` bool, the rows that are counted; by default those with a learning token.

    Reference:
        DeepSeekMath, arXiv 2402.03300, equation 3; Dr. GRPO, arXiv 2503.20783, section 3.2; DAPO,
        arXiv 2503.14476, section 3.3.
    """
    weight = mask.to(torch.float32)
    lengths = weight.sum(dim=1)
    group = kinds if per_turn else torch.zeros_like(kinds)
    _, slot = group.unique(return_inverse=True)
    zeros = weight.new_zeros(int(slot.max()) + 1)
    if aggregate == "token_mean":
        return weight / (zeros.index_add(0, slot, lengths)[slot] + ETA)[:, None]
    counted = lengths > 0 if counted is None else counted
    rows = zeros.index_add(0, slot, counted.to(torch.float32))[slot]
    if aggregate == "sequence_mean":
        rows = rows * lengths
    elif aggregate == "constant":
        if constant_lengths is None:
            raise ValueError("aggregate 'constant' needs constant_lengths")
        rows = rows * constant_lengths
    return weight / rows.clamp(min=1)[:, None]


def aggregate_losses(
    losses: Tensor,
    mask: Tensor,
    kinds: Tensor,
    *,
    aggregate: Aggregate,
    per_turn: bool = False,
    constant_lengths: Tensor | None = None,
) -> Tensor:
    """`[]` the loss of a step whose tokens are all at hand: Σ w ℓ with `aggregation_weights`.

    A training step adds up the same terms over micro-batches and ranks.

    Args:
        losses: `[B, T]` token losses, read only in the mask.
        mask, kinds, aggregate, per_turn, constant_lengths: as in `aggregation_weights`.
    """
    weights = aggregation_weights(
        mask, kinds, aggregate=aggregate, per_turn=per_turn, constant_lengths=constant_lengths
    )
    return (weights * torch.where(mask, losses, 0.0)).sum()


def entropy_weights(contents: Tensor, coefficient: float) -> Tensor:
    """`[B, T]` weights of the entropy bonus: `coefficient` times the mean over content tokens."""
    weight = contents.to(torch.float32)
    return coefficient * weight / (weight.sum() + ETA)


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
