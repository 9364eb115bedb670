"""What a training step passes on: scored rows, token streams, rules, and the trained batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.credit import Credit, CreditInputs, PlacedRewards
from rlx.discovery import build_placement
from rlx.loss import CorrectionWeights, ExpectedScores
from rlx.plugin import Placement
from rlx.spec import PROFILES, CreditSpec, LossSpec

Estimate = Callable[[CreditInputs], Tensor | Credit]


@dataclass(frozen=True, eq=False, kw_only=True)
class CreditRules:
    """How a phase turns rewards into advantages and loss weights.

    Attributes:
        estimator: advantage estimator with its options bound.
        credit: how rewards are placed, and KL in the reward.
        loss: aggregation, correction, and the entropy bonus.
        max_tokens: token budget of each kind of turn; the divisor of `aggregate: constant` if
            `constant_length` is not set.
        confidences: the texts that a stated confidence can be; read with `loss.expected` only.
    """

    estimator: Estimate
    credit: CreditSpec
    loss: LossSpec
    max_tokens: Mapping[str, int]
    confidences: tuple[str, ...] = ()

    @property
    def counts_empty_rows(self) -> bool:
        """Whether rows without a learning token count in averages over rows."""
        return bool(PROFILES[self.credit.profile].get("count_empty_rows"))

    @cached_property
    def placement(self) -> Placement:
        """Which tokens receive the rewards."""
        return build_placement(self.credit)


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
        placed: rewards on tokens, before any KL.
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
    placed: PlacedRewards
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
    def sampled_mask(self) -> Tensor:
        """`[B, T]` bool tokens in the loss mask that the policy sampled."""
        return self.mask & self.batch.is_own
