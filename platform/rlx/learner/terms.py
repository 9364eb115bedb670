"""Policy loss of a micro-batch, and statistics of an optimizer step."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlx.errors import SpecError
from rlx.kl import kl_terms
from rlx.learner.pack import Branches, PackedBatch, copy_to
from rlx.loss import compute_expected_score_loss, compute_token_losses
from rlx.ordered_sums import sum_by_slot
from rlx.rollout import Dialogue
from rlx.spec import LossSpec
from rlx.train_batch import TrainBatch


@dataclass(frozen=True, eq=False, slots=True)
class ConfidenceBranches:
    """The branches of a step's confidences: one per row and value.

    Attributes:
        branches: `R` continuations.
        scores: `[R]` score of the value under the row's label.
        weights: `[R]` weight of the row in the loss.
        values: number of values of a row.
    """

    branches: Branches
    scores: Tensor
    weights: Tensor
    values: int


def encode_confidences(
    values: Sequence[str], span: str, dialogue: Dialogue
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each value after the opening tag of its span, none a prefix of another.

    If the tokens of one value begin another's, as those of 0.8 begin 0.85, each is followed by the
    first token of the closing tag, which tells them apart.

    Raises:
        SpecError: the vocabulary lacks a part of a value, joins it with its tags in one token, or
            does not tell two values apart.
    """
    opening, closing = f"<{span}>", f"</{span}>"
    tokens, closed = [], []
    for text in values:
        ids = dialogue.encode(f"{opening}{text}{closing}")
        _, ends = dialogue.read(ids)
        first, last = len(opening), len(opening) + len(text)
        if first not in ends or last not in ends:
            raise SpecError(
                f"loss.expected: this model's tokenizer joins {text!r} with a tag around it in one "
                "token, so the tag's end is no place where the model chooses a confidence"
            )
        begin, stop = ends.index(first) + 1, ends.index(last) + 1
        tokens.append(ids[begin:stop])
        closed.append(ids[begin : stop + 1])
    tokens = tokens if _is_prefix_free(tokens) else closed
    if not _is_prefix_free(tokens):
        raise SpecError(
            f"loss.expected: this model's tokenizer does not tell the values of <{span}> apart: "
            f"{', '.join(values)}"
        )
    return tuple(tokens)


def _is_prefix_free(sequences: Sequence[tuple[int, ...]]) -> bool:
    ordered = sorted(sequences)
    return all(longer[: len(shorter)] != shorter for shorter, longer in pairwise(ordered))


def build_confidence_branches(
    train: TrainBatch, tokens: Sequence[tuple[int, ...]]
) -> ConfidenceBranches | None:
    """The branches of a batch, with `tokens` from `encode_confidences`; None if no confidence has a
    weight in the loss."""
    expected = train.expected
    if expected is None:
        return None
    weights = expected.coefficient * train.weights[expected.rows, expected.starts]
    weighs = weights != 0
    if not weighs.any():
        return None
    rows, starts, count = expected.rows[weighs], expected.starts[weighs], len(tokens)
    return ConfidenceBranches(
        branches=Branches(
            rows=rows.repeat_interleave(count),
            starts=starts.repeat_interleave(count),
            tokens=tuple(tokens) * len(rows),
        ),
        scores=torch.as_tensor(expected.scores[weighs].flatten()),
        weights=weights[weighs].repeat_interleave(count),
        values=count,
    )


LARGEST = ("ratio_max", "token_ratio_max")
"""Totals of `UpdateSums` that are maxima instead of sums."""


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Statistics of one optimizer step, over all ranks.

    Attributes:
        loss: Σ weight · (surrogate + penalty), minus the entropy bonus and the expected scores.
        entropy: mean over the computed tokens, nats.
        bonus_entropy: mean over the tokens of the entropy bonus, nats; None without a bonus.
        kl: mean of k3 = r - 1 - log r between the old policy (the ratio's denominator) and the
            current one, nats.
        kl_loss: mean KL from the reference with the penalty's estimator, weighted like the loss,
            nats; None without a penalty.
        expected_score: mean expected score of the stated confidences; None without any.
        stated_mass: mean probability that a confidence is one of the task's values.
        clip_fraction: fraction of computed tokens that the surrogate clips (by their or their row's
            ratio), or a mask leaves out.
        ratio_max: largest importance ratio in the loss, of a token or of a row.
        token_ratio_max: largest token ratio, even if the loss uses sequence ratios.
        grad_norm: gradient norm before clipping.
        computed_tokens: packed tokens, without padding.
        row_tokens: tokens of the rows they represent.
    """

    loss: float
    entropy: float
    bonus_entropy: float | None
    kl: float
    kl_loss: float | None
    expected_score: float | None
    stated_mass: float | None
    clip_fraction: float
    ratio_max: float
    token_ratio_max: float
    grad_norm: float
    learning_rate: float
    computed_tokens: int
    row_tokens: int


@dataclass(frozen=True, eq=False, slots=True)
class UpdateTargets:
    """Values of the step's batch at the `[M]` targets of a micro-batch.

    With sequence ratios, all learning tokens of a row with an advantage are included, and
    micro-batches do not split rows.

    Attributes:
        rows: rows of the step's batch.
        old: old log-probabilities (the ratio's denominator), nats.
        bonus: weights of the entropy bonus.
        reference: reference log-probabilities, nats; None without a penalty.
        covariant: tokens to which `loss.covariance` applies; None if off.
    """

    rows: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    bonus: Tensor
    reference: Tensor | None
    covariant: Tensor | None = None

    @classmethod
    def from_packed(
        cls, packed: PackedBatch, train: TrainBatch, spec: LossSpec, bonus_scale: float = 1.0
    ) -> "UpdateTargets":
        """Looks up the targets of a micro-batch; `bonus_scale` multiplies the entropy bonus.

        Raises:
            ValueError: the spec has a KL penalty but the batch has no reference log-probabilities.
        """
        reference = None
        if spec.kl is not None:
            logprobs = train.streams.get("reference_logprobs")
            if logprobs is None:
                raise ValueError("loss.kl needs the stream reference_logprobs")
            reference = packed.gather_targets(logprobs)
        return cls(
            rows=copy_to(packed.rows, packed.targets.device),
            old=packed.gather_targets(train.streams.old_logprobs),
            advantages=packed.gather_targets(train.advantages),
            weights=packed.gather_targets(train.weights),
            bonus=bonus_scale * packed.gather_targets(train.entropy_weights),
            reference=reference,
            covariant=None if train.covariant is None else packed.gather_targets(train.covariant),
        )


class UpdateSums:
    """Running sums (or maxima: `LARGEST`) of one step's statistics, over micro-batches and
    ranks."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[str, ...], Tensor]] = []
        self.totals: dict[str, float] = defaultdict(float)

    def keep(self, **figures: Tensor) -> None:
        """Keeps `[]` figures of a micro-batch where they were computed."""
        values = torch.stack([figure.detach().double() for figure in figures.values()])
        self._kept.append((tuple(figures), values))

    def read_kept(self) -> None:
        """Adds what was kept; the host waits for a device only here. Exact in float64."""
        names = [name for group, _ in self._kept for name in group]
        values = torch.cat([values for _, values in self._kept]).tolist() if names else []
        for name, value in zip(names, values, strict=True):
            self._add(name, value)
        self._kept.clear()

    def _add(self, name: str, value: float) -> None:
        so_far = self.totals[name]
        self.totals[name] = max(so_far, value) if name in LARGEST else so_far + value

    @staticmethod
    def sum_over_ranks(parts: "list[UpdateSums]") -> "UpdateSums":
        whole = UpdateSums()
        for part in parts:
            for name, value in part.totals.items():
                whole._add(name, value)
        return whole

    def stats(
        self, *, grad_norm: float, learning_rate: float, computed_tokens: int, row_tokens: int
    ) -> UpdateStats:
        """Converts sums to means."""
        totals, count = self.totals, max(self.totals["tokens"], 1)

        def divide(name: str, by: str) -> float | None:
            return totals[name] / totals[by] if totals[by] else None

        return UpdateStats(
            loss=totals["loss"],
            entropy=totals["entropy"] / count,
            bonus_entropy=divide("bonus_entropy", "bonus_tokens"),
            kl=totals["kl"] / count,
            kl_loss=divide("kl_loss", "kl_weight"),
            expected_score=divide("expected_score", "confidences"),
            stated_mass=divide("stated_mass", "confidences"),
            clip_fraction=totals["clipped"] / count,
            ratio_max=totals["ratio_max"],
            token_ratio_max=totals["token_ratio_max"],
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            computed_tokens=computed_tokens,
            row_tokens=row_tokens,
        )


def policy_term(
    logprobs: Tensor, entropy: Tensor, targets: UpdateTargets, spec: LossSpec, sums: UpdateSums
) -> Tensor:
    """Computes Σ weight · (surrogate + penalty) - Σ bonus · entropy over a micro-batch's targets.

    Args:
        logprobs: `[M]` nats under the policy being trained.
        entropy: `[M]` nats of the distributions they come from.

    Returns:
        `[]`. A filler micro-batch has no targets; its empty sum still has a zero gradient, so that
            every rank runs every backward pass.
    """
    surrogate = compute_token_losses(
        logprobs, targets.old, targets.advantages, targets.rows, spec, targets.covariant
    )
    losses = surrogate.losses
    if spec.kl is not None and targets.reference is not None:
        penalty = kl_terms(logprobs, targets.reference, spec.kl.kl_penalty)
        losses = losses + spec.kl.coefficient * penalty
        sums.keep(
            kl_loss=(targets.weights * penalty.detach()).sum(), kl_weight=targets.weights.sum()
        )
    term: Tensor = (targets.weights * losses).sum() - (targets.bonus * entropy).sum()
    sums.keep(loss=term)
    if not len(logprobs):
        return term
    with torch.no_grad():
        token_log_ratio = logprobs - targets.old
        ratio, kept_open = surrogate.log_ratio.exp(), targets.bonus != 0
        sums.totals["tokens"] += len(ratio)
        sums.keep(
            kl=(token_log_ratio.expm1() - token_log_ratio).sum(),
            clipped=surrogate.held.sum(),
            entropy=entropy.sum(),
            bonus_entropy=torch.where(kept_open, entropy, 0.0).sum(),
            bonus_tokens=kept_open.sum(),
            ratio_max=ratio.max(),
            token_ratio_max=token_log_ratio.exp().max(),
        )
    return term


def expected_score_term(
    logprobs: Tensor, packed: PackedBatch, confidences: ConfidenceBranches, sums: UpdateSums
) -> Tensor:
    """Computes `rlx.loss.compute_expected_score_loss` over a micro-batch's branches.

    Args:
        logprobs: `[K]` nats of the branches' tokens. A branch is never split.
        confidences: the branches of the step.

    Returns:
        `[]`, with a zero gradient if there are no branches.
    """
    numbers, slots = packed.branches.numbers.unique(return_inverse=True)
    whole = sum_by_slot(logprobs, copy_to(slots, logprobs.device), len(numbers))
    scores, weights = (
        copy_to(values[numbers], whole.device)
        for values in (confidences.scores, confidences.weights)
    )
    term = compute_expected_score_loss(whole, scores, weights)
    mass = whole.detach().exp()
    sums.keep(loss=term, expected_score=(mass * scores).sum(), stated_mass=mass.sum())
    sums.totals["confidences"] += len(numbers) / confidences.values
    return term


CHUNK = 8192
"""Tokens of the vocabulary per chunk."""


def compute_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    states: Tensor,
    tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes log p(tokens[k] | states[k]) and the entropy H of every state, `CHUNK` by `CHUNK`,
    with

        z = (hidden · weightᵀ + bias) / temperature,    log p = z - logsumexp z,    H = -Σ p log p.

    Args:
        hidden: `[N, D]` last hidden states.
        weight: `[V, D]` of the output layer.
        bias: `[V]`, or None.
        temperatures: `[N]`.
        states: `[K]` indices of hidden states; one may be repeated.
        tokens: `[K]` token ids.

    Returns:
        `[K]` and `[N]` float32, nats. Gradients flow to `hidden`, `weight` and `bias`.
    """
    made: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, temperatures, states, tokens
    )
    return made


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor,
        states: Tensor,
        tokens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        highest = torch.full((count,), -torch.inf, device=hidden.device)
        total = torch.zeros(count, device=hidden.device)  # Σ exp(z - highest)
        spread = torch.zeros_like(total)  # Σ exp(z - highest) · (z - highest)
        chosen = torch.zeros(len(tokens), device=hidden.device)
        for start, z in _iterate_logits(hidden, weight, bias, temperatures):
            top = torch.maximum(highest, z.amax(dim=1))
            fall = (highest - top).nan_to_num(nan=0.0, neginf=0.0)  # total is 0 where it was -inf
            shrink = fall.exp()
            spread = shrink * (spread + fall * total)
            is_here, column = _locate_tokens(tokens, start, z)
            chosen = torch.where(is_here, z[states, column], chosen)
            z -= top[:, None]
            weighted = z.exp()
            total = shrink * total + weighted.sum(dim=1)
            spread += weighted.mul_(z).sum(dim=1)
            highest = top
        log_total = total.log()
        logsumexp, entropy = highest + log_total, log_total - spread / total
        ctx.save_for_backward(
            hidden, weight, bias, temperatures, states, tokens, logsumexp, entropy
        )
        ctx.set_materialize_grads(False)  # the entropy rarely has a gradient
        return chosen - logsumexp[states], entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """∂ log p(t) / ∂z = 1[t] - p and ∂H / ∂z = -p · (log p + H), by chunks."""
        hidden, weight, bias, temperatures, states, tokens, logsumexp, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        if of_logprobs is None:
            of_logprobs = torch.zeros(len(tokens), device=hidden.device)
        each = sum_by_slot(of_logprobs, states, len(logsumexp))
        d_hidden = torch.zeros(hidden.shape, device=hidden.device) if to_hidden else None
        d_weight = torch.empty_like(weight) if to_weight else None
        d_bias = torch.empty_like(bias) if to_bias else None
        for start, z in _iterate_logits(hidden, weight, bias, temperatures):
            part = slice(start, start + z.shape[1])
            is_here, column = _locate_tokens(tokens, start, z)
            z -= logsumexp[:, None]
            if of_entropy is None:
                gradient = z.exp_().mul_(-each[:, None])
            else:
                p = z.exp()
                # -p · (each + of_entropy · (log p + H))
                z.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(each[:, None])
                gradient = p.mul_(z).neg_()
            gradient.index_put_((states, column), of_logprobs * is_here, accumulate=True)
            gradient = gradient.div_(temperatures[:, None]).to(weight.dtype)
            if d_hidden is not None:
                d_hidden += gradient @ weight[part]
            if d_weight is not None:
                d_weight[part] = gradient.t() @ hidden
            if d_bias is not None:
                d_bias[part] = gradient.sum(dim=0)
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _iterate_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yields the first token of every chunk, and its `[N, CHUNK]` float32 logits, to be changed."""
    for start in range(0, len(weight), CHUNK):
        part = slice(start, start + CHUNK)
        logits = functional.linear(hidden, weight[part], None if bias is None else bias[part])
        yield start, logits / temperatures[:, None]  # float32, as the temperatures are


def _locate_tokens(tokens: Tensor, start: int, z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which tokens are in a chunk, and a valid column of it for each."""
    column = tokens - start
    return (column >= 0) & (column < z.shape[1]), column.clamp(0, z.shape[1] - 1)
