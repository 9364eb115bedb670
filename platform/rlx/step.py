"""From rewards to advantages and loss weights, in the order of a training step.

rollouts   = sample(prompts), several per prompt; score(every turn, every rollout)
mask       = the tokens that learn
streams    = log-probabilities under the old and the reference policy, values of a critic
placed     = rewards on tokens, less β · KL from the reference policy
advantages = estimator(placed), most often within the rollouts of one prompt
weights    = aggregation over tokens and rows, times learner/sampler
update     : minimise Σ weight · (surrogate(ratio, advantage) + penalty) - entropy bonus

`rlx.run` samples and updates. All between is here: `rlx plan`, check and rescoring do it, too.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlx.batch import TokenBatch, build_token_batch, list_batch_rows
from rlx.credit import (
    Credit,
    CreditInputs,
    place_rewards,
    structured_scores,
    sum_masked_returns,
    sum_token_rewards,
)
from rlx.errors import PluginError, RlxError
from rlx.kl import kl_terms, subtract_kl_penalty
from rlx.loss import (
    CorrectionWeights,
    ExpectedScores,
    aggregation_weights,
    compute_correction_weights,
    compute_proper_scores,
    entropy_weights,
    select_covariant_tokens,
)
from rlx.phase_setup import CreditRules, Estimate, PhaseSetup
from rlx.reward import RewardTable, compute_mean_value
from rlx.rollout import RolloutTree
from rlx.seeding import derive_seed
from rlx.spec import CreditSpec, KlCovariance, LossSpec

Place = tuple[int, int]


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredRows:
    """Rows of tokens with their rewards, not yet placed, and the loss mask of the mask strategy."""

    batch: TokenBatch
    rewards: CreditInputs

    @classmethod
    def join(cls, batch: TokenBatch, mask: Tensor, **rewards: Any) -> "ScoredRows":
        """Joins rows with their `[B, T]` loss mask and the fields of `CreditInputs` that hold
        rewards."""
        return cls(
            batch=batch,
            rewards=CreditInputs(
                token_rewards=torch.zeros(mask.shape),
                turn_ids=batch.turn_ids,
                mask=mask,
                group_ids=batch.group_ids,
                levels=batch.levels,
                tree_ids=batch.tree_ids,
                state_ids=batch.state_ids,
                is_confidence=batch.is_confidence,
                **rewards,
            ),
        )

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool loss mask."""
        return self.rewards.mask


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenStreams:
    """Model outputs for a batch's tokens: the inputs of credit assignment besides the rewards.

    Attributes:
        old_logprobs: `[B, T]` nats under the old policy; read only inside the mask.
        optional: the streams that the estimator or the loss needs, by their names in
            `rlx_registry.STREAMS`.
        beta: β of KL in the reward at this step.
        state: estimator state carried over from the previous step.
    """

    old_logprobs: Tensor
    optional: Mapping[str, Tensor] = field(default_factory=dict)
    beta: float = 0.0
    state: Mapping[str, float] = field(default_factory=dict)

    def get(self, name: str) -> Tensor | None:
        """A stream by name; None if the step has none."""
        return self.old_logprobs if name == "old_logprobs" else self.optional.get(name)


@dataclass(frozen=True, eq=False, kw_only=True)
class RowScores:
    """The three scores of a row, `[B]` each.

    Attributes:
        total_score: mean(turn) + Σ global.
        token_level_scores: Σ of the rewards as placed on tokens, before any KL.
        masked_return_sum: Σ of returns over the mask (KG-R1, arXiv 2509.26383).
    """

    total_score: Tensor
    token_level_scores: Tensor
    masked_return_sum: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainBatch:
    """Everything the learner needs for one step, and the intermediate results to record.

    Attributes:
        batch: the rows.
        mask: `[B, T]` bool loss mask.
        advantages: `[B, T]`, 0 outside the mask.
        weights: `[B, T]` aggregation weights, times the correction weights if there are any; the
            step's loss is Σ weights · token loss.
        entropy_weights: `[B, T]` the same for the entropy bonus; all 0 without one.
        wanted: `[B, T]` bool tokens whose log-probability enters the loss; the others need not be
            computed.
        streams: the input streams.
        placed: the rewards, placed on tokens, before any KL.
        token_rewards: `[B, T]` token rewards as the estimator reads them.
        kl: `[B, T]` nats, KL from the reference policy by the estimator of `credit.kl_penalty`, 0
            outside the mask; None without a reference.
        returns: `[B, T]` targets of the critic; the advantages if the estimator has no returns.
        scores: the three scores of each row.
        correction: importance weights for the mismatch between sampler and learner; None if off.
        state: estimator state for the next step.
        covariant: `[B, T]` bool tokens to which `loss.covariance` applies; None if off.
        expected: stated confidences whose expected score is part of the loss; None if off.
    """

    batch: TokenBatch
    mask: Tensor
    advantages: Tensor
    weights: Tensor
    entropy_weights: Tensor
    wanted: Tensor
    streams: TokenStreams
    placed: CreditInputs
    token_rewards: Tensor
    kl: Tensor | None
    returns: Tensor
    scores: RowScores
    correction: CorrectionWeights | None
    state: Mapping[str, float]
    covariant: Tensor | None = None
    expected: ExpectedScores | None = None

    def find_stream(self, name: str) -> Tensor | None:
        """A stream of the step, whoever computed it, by its name in `rlx_registry.STREAMS`."""
        if name == "placed":
            return self.placed.token_rewards
        stream: Tensor | None = getattr(self, name, self.streams.get(name))
        return stream

    @property
    def lost(self) -> Tensor:
        """`[B]` reward that lies on no token."""
        assert self.placed.lost is not None
        return self.placed.lost

    @property
    def sampled_mask(self) -> Tensor:
        """`[B, T]` bool tokens in the loss mask that the policy sampled."""
        return self.mask & self.batch.is_own


def assign_credit(rows: ScoredRows, streams: TokenStreams, rules: CreditRules) -> TrainBatch:
    """From the rewards of a batch to advantages, returns and loss weights of its tokens.

    Raises:
        PluginError: the estimator returns a wrong shape, non-finite values, or values outside the
            mask.
        RlxError: KL from the reference policy is not finite.
        ValueError: a reward is not finite.
    """
    placed = place_row_rewards(rows, rules)
    token_rewards, kl = subtract_kl(placed.token_rewards, rows.mask, streams, rules.credit)
    inputs = replace(
        placed,
        token_rewards=token_rewards,
        score_source=rules.credit.score_source,
        streams={"old_logprobs": streams.old_logprobs, **streams.optional},
        state=streams.state,
    )
    credit = estimate_credit(rules.estimator, inputs)
    advantages, expected = credit.advantages, build_expected_scores(rows, rules)
    if expected is not None:  # the loss sums over the values of a confidence instead
        advantages = advantages.masked_fill(expected.tokens, 0.0)
    returns = advantages if credit.returns is None else credit.returns
    weights = compute_token_weights(rows, advantages, streams, rules)
    return TrainBatch(
        batch=rows.batch,
        mask=rows.mask,
        streams=streams,
        placed=placed,
        token_rewards=token_rewards,
        kl=kl,
        advantages=advantages,
        returns=returns,
        scores=compute_row_scores(placed, returns),
        state=credit.state,
        expected=expected,
        **weights._asdict(),
    )


def build_scored_rows(
    setup: PhaseSetup,
    trees: Sequence[RolloutTree],
    table: RewardTable,
    *,
    without: Collection[Place],
    mask: Tensor | None = None,
) -> ScoredRows | None:
    """Flattens trees into rows with rewards and loss mask, without those rows, each `(tree,
    segment)` of its last turn; None if no row is left. A known `mask` takes the place of the
    strategy's."""
    if all((row.tree, row.segment) in without for row in list_batch_rows(trees)):
        return None
    batch = build_token_batch(trees, temperatures=setup.temperatures, without=without)
    expected = setup.spec.loss.expected
    over = "path" if expected is None else expected.over
    mask = setup.mask(batch) if mask is None else mask
    return join_row_rewards(batch, trees, table, mask, label=setup.label, over=over)


def find_lost_rows(
    trees: Sequence[RolloutTree], table: RewardTable, *, needs_reward: bool = True
) -> set[Place]:
    """Rows that were dropped or lack the reward that they need, each as `(tree, segment)` of its
    last turn."""
    return {
        (row.tree, row.segment)
        for row in list_batch_rows(trees)
        if (row.tree, row.segment) in table.dropped
        or (needs_reward and table.total_score(row.tree, row.turns) is None)
    }


def compute_answer_scores(
    trees: Sequence[RolloutTree], table: RewardTable, numbers: Sequence[int]
) -> Tensor:
    """`[B]` structured score of the first answer of each of these trees, by number."""
    places = [(number, trees[number].policy_segments[0]) for number in numbers]
    return torch.tensor(
        [(table.get_turn_total(p) or 0.0) + (table.get_rollout_total(p) or 0.0) for p in places]
    )


def join_row_rewards(
    batch: TokenBatch,
    trees: Sequence[RolloutTree],
    table: RewardTable,
    mask: Tensor,
    *,
    label: str | None = None,
    over: Literal["path", "prompt"] = "path",
) -> ScoredRows:
    """Sums the table's weighted rewards per row of a batch with a loss mask; turn k is at column k
    - 1.

    `label` names the turn reward of `CreditInputs.labels`, and `over` says whether it is the row's
    own or the mean over its prompt.
    """
    shape = tuple(batch.state_ids.shape)
    turns, present = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    whole = torch.zeros(shape[0])
    for b, row in enumerate(batch.rows):
        whole[b] = table.get_rollout_total((row.tree, row.segment)) or 0.0
        for segment in row.turns:
            total = table.get_turn_total((row.tree, segment))
            if total is not None:
                at = trees[row.tree].segments[segment].turn - 1
                turns[b, at], present[b, at] = total, True
    labels = None
    if label is not None:
        labels = torch.tensor(
            [
                _find_label(trees[r.tree], table, (r.tree, r.segment), label, over)
                for r in batch.rows
            ]
        )
    weights: dict[tuple[str, str], float] = {}
    raw: list[dict[tuple[str, str], list[float]]] = []
    for row in batch.rows:
        entries = [
            ("turn", entry)
            for segment in row.turns
            for entry in table.turns.get((row.tree, segment), {}).values()
        ]
        entries += [
            ("global", entry) for entry in table.rollouts.get((row.tree, row.segment), {}).values()
        ]
        found: dict[tuple[str, str], list[float]] = {}
        for scope, entry in entries:
            if entry.is_summed and entry.raw is not None:
                weights[scope, entry.name] = entry.weight
                found.setdefault((scope, entry.name), []).append(entry.raw)
        raw.append(found)
    names = sorted(weights)
    values = [[fmean(row[n]) if n in row else math.nan for n in names] for row in raw]
    return ScoredRows.join(
        batch,
        mask,
        turn_rewards=turns,
        turn_present=present,
        global_rewards=whole,
        labels=labels,
        named_rewards=torch.tensor(values).reshape(len(raw), len(names)),
        reward_weights=tuple(weights[name] for name in names),
    )


def _find_label(
    tree: RolloutTree, table: RewardTable, place: Place, name: str, over: Literal["path", "prompt"]
) -> float:
    """Raw value of a turn reward at a turn or the nearest one before that has it, or its mean over
    all turns of the prompt; NaN where it is absent."""
    number, segment = place
    if over == "prompt":
        mean = compute_mean_value(tree, place, name, table.turns)
        return math.nan if mean is None else mean
    for index in reversed(tree.path(segment)):
        entry = table.turns.get((number, index), {}).get(name)
        if entry is not None and entry.raw is not None:
            return entry.raw
    return math.nan


def place_row_rewards(rows: ScoredRows, rules: CreditRules) -> CreditInputs:
    """Places rewards on tokens.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards, credit = rows.rewards, rules.credit
    for tensor in (rewards.turn_rewards[rewards.turn_present], rewards.global_rewards):
        if not torch.isfinite(tensor).all():
            raise ValueError("a reward is not finite: scoring must have turned it into an absence")
    return place_rewards(
        rewards,
        placement=rules.placement,
        turn_reduce=credit.turn_reduce,
        on_missing_turn=credit.on_missing_turn,
    )


def subtract_kl(
    rewards: Tensor, mask: Tensor, streams: TokenStreams, credit: CreditSpec
) -> tuple[Tensor, Tensor | None]:
    """Token rewards as the estimator reads them, and the KL; None without a reference.

    Raises:
        RlxError: KL from the reference policy is not finite.
    """
    old, reference = streams.old_logprobs, streams.get("reference_logprobs")
    if reference is None:
        return rewards, None
    kl = torch.where(mask, kl_terms(old, reference, credit.kl_penalty), 0.0)
    if not kl.isfinite().all():
        raise RlxError("KL from the reference policy is not finite: a model gives no probability")
    if not credit.use_kl_in_reward:
        return rewards, kl
    less = subtract_kl_penalty(
        rewards, old, reference, mask, beta=streams.beta, kind=credit.kl_penalty
    )
    return less, kl


def estimate_credit(estimator: Estimate, inputs: CreditInputs) -> Credit:
    """Calls an estimator, and checks what every estimator must guarantee.

    Raises:
        PluginError: a tensor has a wrong shape, is not finite, or is nonzero outside the mask.
    """
    estimate, mask = estimator(inputs), inputs.mask
    credit = estimate if isinstance(estimate, Credit) else Credit(advantages=estimate)
    for name, tensor in (("advantages", credit.advantages), ("returns", credit.returns)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != mask.shape:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise PluginError(
                f"the estimator returned {name} of shape {found}, not [B, T] = {tuple(mask.shape)}"
            )
        wrong = ~tensor.isfinite() | (~mask & (tensor != 0))
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            where = "" if mask[row, token] else ", which is outside the mask"
            raise PluginError(
                f"the estimator returned {float(tensor[row, token])} in its {name} for token "
                f"{token} of row {row}{where}: `rlx plugins check` tests what an estimator must "
                "guarantee"
            )
    return credit


def build_expected_scores(rows: ScoredRows, rules: CreditRules) -> ExpectedScores | None:
    """The confidences whose expected score is part of the loss; None without `loss.expected`.

    These are the rows with a label whose confidence begins with a token that learns. All other rows
    keep their sampled credit.

    Raises:
        ValueError: a label lies outside [0, 1].
    """
    spec, labels = rules.loss.expected, rows.rewards.labels
    if spec is None:
        return None
    content = rows.batch.contents.get(spec.span, torch.zeros_like(rows.mask))
    if labels is None:
        raise ValueError("loss.expected needs the labels of the rows")
    starts = content.to(torch.int8).argmax(dim=1)
    begins = (content & rows.mask).gather(1, starts[:, None])[:, 0]
    indices = (begins & labels.isfinite()).nonzero()[:, 0]
    values = torch.tensor([float(text) for text in rules.confidences])
    has_score = torch.zeros(len(labels), dtype=torch.bool).index_fill(0, indices, True)
    return ExpectedScores(
        values=rules.confidences,
        rows=indices,
        starts=starts[indices],
        scores=compute_proper_scores(values, labels[indices], spec.score),
        tokens=content & rows.mask & has_score[:, None],
        coefficient=spec.coefficient,
    )


class TokenWeights(NamedTuple):
    weights: Tensor
    entropy_weights: Tensor
    wanted: Tensor
    correction: CorrectionWeights | None
    covariant: Tensor | None


def compute_token_weights(
    rows: ScoredRows, advantages: Tensor, streams: TokenStreams, rules: CreditRules
) -> TokenWeights:
    """Aggregation weights of a batch's token losses, times the correction weights if any."""
    batch, mask, loss = rows.batch, rows.mask, rules.loss
    weights, bonus = _aggregate(batch, mask, mask.new_ones(len(mask)), rules)
    correction = None
    if loss.correction is not None:
        old, behaviour, own = streams.old_logprobs, batch.behaviour_logprobs, mask & batch.is_own
        correction = compute_correction_weights(old, behaviour, own, loss.correction)
        weights, bonus = weights * correction.weights, bonus * correction.weights
    covariant = None
    if loss.covariance is not None:
        # Of the tokens: equal batches make equal draws, in a run and when rescored.
        tokens = hashlib.blake2b(batch.token_ids.cpu().numpy().tobytes(), digest_size=8)
        seed = derive_seed(0, "covariance", tokens.hexdigest())
        old = streams.old_logprobs
        covariant = select_covariant_tokens(advantages, old, mask, loss.covariance, seed)
    wanted = _select_gradient_tokens(advantages, weights, bonus, mask, loss)
    if isinstance(loss.covariance, KlCovariance) and covariant is not None:
        wanted |= covariant & (weights != 0)
    return TokenWeights(weights, bonus, wanted, correction, covariant)


def compute_row_scores(placed: CreditInputs, returns: Tensor) -> RowScores:
    return RowScores(
        total_score=structured_scores(
            placed.turn_rewards, placed.turn_present, placed.global_rewards
        ),
        token_level_scores=sum_token_rewards(placed.token_rewards, placed.mask),
        masked_return_sum=sum_masked_returns(returns, placed.mask),
    )


def split_mini_batches(train: TrainBatch, parts: int, rules: CreditRules) -> list[TrainBatch]:
    """Splits a batch for several optimizer steps: parts of equally many prompts, in order.

    A part has the whole batch's rows, advantages and returns, but only its own rows learn, and the
    loss averages over these. There are fewer parts if the batch has fewer prompts.

    Reference:
        PPO, arXiv 1707.06347, algorithm 1: minibatches.
    """
    if parts == 1:
        return [train]
    trees = train.batch.tree_ids
    return [
        _keep_rows(train, torch.isin(trees, own), rules)
        for own in torch.tensor_split(trees.unique(), parts)
        if len(own)
    ]


def _keep_rows(train: TrainBatch, rows: Tensor, rules: CreditRules) -> TrainBatch:
    """The batch with the loss of some rows, `[B]` bool."""
    mask = train.mask & rows[:, None]
    weights, bonus = _aggregate(train.batch, mask, rows, rules)
    if train.correction is not None:
        factors = train.correction.weights
        weights, bonus = weights * factors, bonus * factors
    wanted = train.wanted & rows[:, None]
    return replace(train, mask=mask, weights=weights, entropy_weights=bonus, wanted=wanted)


def _aggregate(
    batch: TokenBatch, mask: Tensor, rows: Tensor, rules: CreditRules
) -> tuple[Tensor, Tensor]:
    """Weights of the token losses and of the entropy bonus of some rows, `[B]` bool."""
    loss = rules.loss
    lengths = [loss.constant_length or rules.max_tokens[row.kind] for row in batch.rows]
    weights = aggregation_weights(
        mask,
        batch.levels,
        aggregate=loss.aggregate,
        per_turn=loss.per_turn,
        constant_lengths=torch.tensor(lengths),
        counted=rows if rules.counts_empty_rows else None,
    )
    bonus = torch.zeros_like(weights)
    if loss.entropy is not None:
        span = loss.entropy.span
        content = mask if span is None else batch.contents.get(span, torch.zeros_like(mask)) & mask
        bonus = entropy_weights(content, loss.entropy.coefficient)
    return weights, bonus


def _select_gradient_tokens(
    advantages: Tensor, weights: Tensor, bonus: Tensor, mask: Tensor, loss: LossSpec
) -> Tensor:
    """`[B, T]` bool tokens whose log-probability enters the loss with a gradient."""
    signal = (advantages != 0) & (weights != 0)
    if loss.kl is not None:
        return mask.clone()
    # A row's ratio, or its distance from the old policy, is a mean over its masked-in tokens.
    if loss.ratio != "token" or loss.sequence_mask is not None:
        signal = mask & signal.any(dim=1, keepdim=True)
    return signal | (bonus != 0)
