"""What placements and estimators read and give: rewards of rows, their placement on tokens, and the
scores and spreads that estimators share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from rlx.discovery import bind_implementation
from rlx.errors import RlxError, ShapeError
from rlx.plugin import Placement
from rlx.spec import OnMissingTurn, ScoreSource, TurnReduce
from rlx_registry import STREAMS


@dataclass(frozen=True, eq=False, kw_only=True)
class CreditInputs:
    """The rewards of a batch's rows, and all else that a placement and an estimator read.

    Attributes:
        turn_rewards: `[B, K]` weighted sum of a turn's named rewards, turn k at index k - 1; 0
            where not `turn_present`. For a placement, already divided by the number of rewarded
            turns if these are averaged.
        turn_present: `[B, K]` bool the turn was rewarded. Absent is not zero.
        global_rewards: `[B]` weighted sum of the rewards of the whole rollout; 0 if there are none.
        token_rewards: `[B, T]` the same rewards as placed on tokens, minus β·KL if KL is part of
            the reward; 0 outside the mask, and everywhere until rewards are placed.
        lost: `[B]` reward that lies on no token, so that placed and lost rewards add up to the
            rewards of turns and rollout; None until rewards are placed.
        turn_ids: `[B, T]` int64 turn number of the row's own tokens, from 1; -1 elsewhere.
        mask: `[B, T]` bool tokens that learn.
        group_ids: `[B]` int64 rows with equal ids may be compared.
        levels: `[B]` int64 0 for rows that continue a prompt, 1 for rows that continue those, ...
        tree_ids: `[B]` int64 rows with equal ids were grown from one prompt.
        state_ids: `[B, K]` int64 state in which a turn began: within a tree, equal ids are the same
            state. -1 if the row has no such turn.
        is_confidence: `[B]` bool rows that judge an answer, as `TokenBatch.is_confidence`; None
            means all rows below level 0.
        labels: `[B]` raw value of the reward that tells right from wrong, of the row or of what it
            continues; NaN where there is none.
        named_rewards: `[B, N]` raw value of each named reward that counts, a turn reward averaged
            over the row's turns that have it; NaN where the row has none.
        reward_weights: weights of the N named rewards.
        score_source: how a row's score is computed; see `total_scores`.
        streams: those of `rlx_registry.STREAMS` that the estimator's `needs` names, and
            `old_logprobs`, by name; `stream` looks one up. Integers are -1 where a token has none.
        state: values that the estimator carries from one training step to the next.
    """

    turn_rewards: Tensor
    turn_present: Tensor
    global_rewards: Tensor
    token_rewards: Tensor
    turn_ids: Tensor
    mask: Tensor
    group_ids: Tensor
    levels: Tensor
    tree_ids: Tensor
    state_ids: Tensor
    is_confidence: Tensor | None = None
    labels: Tensor | None = None
    named_rewards: Tensor | None = None
    reward_weights: tuple[float, ...] = ()
    lost: Tensor | None = None
    score_source: ScoreSource = "structured"
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self.global_rewards)
        for name, value in {**vars(self), **self.streams}.items():
            if isinstance(value, Tensor) and len(value) != rows:
                raise ShapeError(f"{name} has {len(value)} rows, not {rows}")
        columns = 0 if self.named_rewards is None else self.named_rewards.shape[1]
        if columns != len(self.reward_weights):
            raise ShapeError(f"named_rewards has {columns} columns, not {len(self.reward_weights)}")
        if self.global_rewards.dim() != 1:
            raise ShapeError(f"global_rewards is {tuple(self.global_rewards.shape)}, not [B]")
        for one, other in (
            ("turn_present", "turn_rewards"),
            ("state_ids", "turn_rewards"),
            ("turn_ids", "mask"),
            ("token_rewards", "mask"),
            *((name, "mask") for name in self.streams if STREAMS[name].shape == "[B, T]"),
        ):
            tensor = self.stream(one)
            if tensor.shape != getattr(self, other).shape:
                shapes = tuple(tensor.shape), tuple(getattr(self, other).shape)
                raise ShapeError(f"{one} is {shapes[0]}, {other} is {shapes[1]}")

    @classmethod
    def from_rewards(
        cls,
        turn_rewards: Tensor,
        turn_present: Tensor,
        global_rewards: Tensor,
        turn_ids: Tensor,
        mask: Tensor,
    ) -> "CreditInputs":
        """Inputs with nothing but rewards and a mask: every row answers a prompt of its own."""
        rows = torch.arange(len(global_rewards))
        return cls(
            turn_rewards=turn_rewards,
            turn_present=turn_present,
            global_rewards=global_rewards,
            token_rewards=turn_rewards.new_zeros(mask.shape),
            turn_ids=turn_ids,
            mask=mask,
            group_ids=rows,
            levels=torch.zeros_like(rows),
            tree_ids=rows,
            state_ids=torch.zeros(turn_rewards.shape, dtype=torch.int64),
        )

    @cached_property
    def turn_masks(self) -> tuple[Tensor, ...]:
        """`[B, T]` bool of each turn: its tokens in the mask."""
        turns = range(1, self.turn_rewards.shape[1] + 1)
        return tuple(self.mask & (self.turn_ids == number) for number in turns)

    @property
    def missing(self) -> Tensor:
        """`[B, K]` bool the turn is rewarded and has no token in the mask."""
        return self.turn_present & (self.turn_sizes == 0)

    @cached_property
    def _counts(self) -> Tensor:
        masks = (*self.turn_masks, self.mask)
        return torch.stack([tokens.sum(dim=1, dtype=torch.int32) for tokens in masks], 1)

    @property
    def turn_sizes(self) -> Tensor:
        """`[B, K]` int32 number of tokens of each turn in the mask."""
        return self._counts[:, :-1]

    @property
    def row_sizes(self) -> Tensor:
        """`[B]` int32 number of tokens in the mask."""
        return self._counts[:, -1]

    def stream(self, name: str) -> Tensor:
        """A stream that the estimator's `needs` names.

        Raises:
            ShapeError: it does not name it.
        """
        tensor = self.streams.get(name, getattr(self, name, None))
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"CreditInputs has no {name}: name it in the estimator's `needs`")
        return tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Credit:
    """Result of an estimator that returns more than advantages.

    Attributes:
        advantages: `[B, T]`, 0 outside the mask.
        returns: `[B, T]` targets of the critic, 0 outside the mask; None without a critic.
        state: values to pass as `CreditInputs.state` at the next training step.
    """

    advantages: Tensor
    returns: Tensor | None = None
    state: Mapping[str, float] = field(default_factory=dict)


def sum_token_rewards(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """`[B]` sum of a row's `[B, T]` token rewards in the mask, which is KG-R1's sum of token scores
    (arXiv 2509.26383)."""
    return torch.where(mask, token_rewards, 0.0).sum(dim=1)


def structured_scores(turn_rewards: Tensor, turn_present: Tensor, global_rewards: Tensor) -> Tensor:
    """`[B]` meanₖ(turn rewardₖ) + Σ global; only Σ global if no turn is rewarded (KG-R1, arXiv
    2509.26383). The `[B, K]` turn rewards are read only where present."""
    turns = turn_present.sum(dim=1)
    rewards = torch.where(turn_present, turn_rewards, 0.0).sum(dim=1)
    return rewards / turns.clamp(min=1) + global_rewards


def total_scores(inputs: CreditInputs) -> Tensor:
    """`[B]` one score per row, according to `credit.score_source`.

        structured:     meanₖ(turn rewardₖ) + Σ global
        token_rewards:  Σₜ rₜ over the mask, which includes -β Σ KL if KL is in the reward

    Reference:
        KG-R1, arXiv 2509.26383: token sum or structured score.
    """
    if inputs.score_source == "token_rewards":
        return sum_token_rewards(inputs.token_rewards, inputs.mask)
    return structured_scores(inputs.turn_rewards, inputs.turn_present, inputs.global_rewards)


def spread_over_mask(per_row: Tensor, mask: Tensor) -> Tensor:
    """`[B]` to `[B, T]`, by selection instead of multiplication: NaN cannot leak past the mask."""
    return torch.where(mask, per_row[:, None], 0.0)


def spread_over_turns(per_turn: Tensor, per_row: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
    """`[B, K]` and `[B]` to `[B, T]`: a token of turn k gets the value of its turn and of its row.

    A turn's number is its column plus one. A turn without a column adds 0; tokens of no turn and
    tokens outside the mask get 0.
    """
    # A leading column of zeros serves the tokens whose turn has no column.
    table = torch.nn.functional.pad(per_turn, (1, 0))
    known = (turn_ids >= 1) & (turn_ids <= per_turn.shape[1])
    tokens = table.gather(1, torch.where(known, turn_ids, 0)) + per_row[:, None]
    return torch.where(mask & (turn_ids >= 1), tokens, 0.0)


class TurnWithoutTokens(RlxError):
    """A rewarded turn has no learning token, and the spec makes that an error."""

    def __init__(self, row: int, turn: int) -> None:
        super().__init__(
            f"row {row}, turn {turn}: rewarded, but no token of this turn learns; widen the mask, "
            "or set on_missing_turn to 'drop' or 'to_last_token'"
        )
        self.row, self.turn = row, turn


def place_rewards(
    inputs: CreditInputs,
    *,
    placement: Placement,
    turn_reduce: TurnReduce | None = None,
    on_missing_turn: OnMissingTurn = "drop",
) -> CreditInputs:
    """Puts each row's rewards on its tokens: fills in `token_rewards` and `lost`.

    With `turn_reduce="mean"` the reward of each turn is first divided by the number of rewarded
    turns, those without tokens included; None is the placement's own. Under `on_missing_turn` the
    reward of a turn without tokens is dropped, moved to the row's last token, or an error.

    Raises:
        ValueError: `turn_reduce` is unknown.
        TurnWithoutTokens: under `on_missing_turn="error"`.
        ShapeError: the placement returns another shape than that of the mask.
        PluginError: the placement's implementation cannot be imported.
    """
    reduce = turn_reduce or placement.turn_reduce
    if reduce not in ("sum", "mean"):
        raise ValueError(f"turn_reduce is {reduce!r}, not one of sum, mean")
    mask = inputs.mask
    turns = torch.where(inputs.turn_present, inputs.turn_rewards, 0.0)
    if reduce == "mean":
        turns = turns / inputs.turn_present.sum(dim=1, keepdim=True).clamp(min=1)
    reduced = replace(inputs, turn_rewards=turns)
    missing = reduced.missing
    if on_missing_turn == "error" and missing.any():
        row, column = missing.nonzero()[0].tolist()
        raise TurnWithoutTokens(row, turn=column + 1)

    token_rewards = bind_implementation(placement)(reduced)
    if token_rewards.shape != mask.shape:
        found = tuple(token_rewards.shape)
        raise ShapeError(f"the placement returned {found}, not {tuple(mask.shape)}")
    dropped = torch.where(missing, turns, 0.0).sum(dim=1) * placement.needs_turn_tokens
    if on_missing_turn == "to_last_token":
        _add_to_last_token(token_rewards, mask, dropped)
        dropped = torch.zeros_like(dropped)
    everything = turns.sum(dim=1) + inputs.global_rewards
    lost = torch.where(reduced.row_sizes > 0, dropped, everything)
    return replace(inputs, token_rewards=token_rewards, lost=lost)


def place_in_shares(inputs: CreditInputs) -> Tensor:
    """`turn_proportional`: rₜ = R_k / n_k for t in turn k,  + G / n  on all n tokens.

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    overall = inputs.global_rewards / inputs.row_sizes.clamp(min=1)
    shares = inputs.turn_rewards / inputs.turn_sizes.clamp(min=1)
    token_rewards = torch.where(inputs.mask, overall[:, None], 0.0)
    for tokens, share in zip(inputs.turn_masks, shares.unbind(1), strict=True):
        token_rewards += torch.where(tokens, share[:, None], 0.0)
    return token_rewards


def place_at_turn_ends(inputs: CreditInputs) -> Tensor:
    """`turn_end`: rₜ = R_k on the last token of turn k,  + G on the row's last token."""
    token_rewards = inputs.turn_rewards.new_zeros(inputs.mask.shape)
    for tokens, reward in zip(inputs.turn_masks, inputs.turn_rewards.unbind(1), strict=True):
        _add_to_last_token(token_rewards, tokens, reward)
    _add_to_last_token(token_rewards, inputs.mask, inputs.global_rewards)
    return token_rewards


def place_at_row_end(inputs: CreditInputs) -> Tensor:
    """`final_token_only`: rₜ = Σₖ R_k + G on the row's last token.

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    token_rewards = inputs.turn_rewards.new_zeros(inputs.mask.shape)
    total = inputs.turn_rewards.sum(dim=1) + inputs.global_rewards
    _add_to_last_token(token_rewards, inputs.mask, total)
    return token_rewards


def sum_masked_returns(returns: Tensor, mask: Tensor) -> Tensor:
    """`[B]` sum of a row's `[B, T]` returns, or advantages, over its mask: what KG-R1 calls its
    score (arXiv 2509.26383).

    For γ = λ = 1 and one reward R on the last of n tokens this is n · R, so it grows with length.
    """
    return torch.where(mask, returns, 0.0).sum(dim=1)


def _add_to_last_token(token_rewards: Tensor, tokens: Tensor, rewards: Tensor) -> None:
    """Adds `[B]` rewards in place to the last of the `[B, T]` tokens of each row that has any."""
    if tokens.shape[1] == 0:
        return
    at = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    last = (tokens * at).amax(dim=1, keepdim=True).long()
    some = torch.where(tokens.gather(1, last), rewards[:, None], 0.0)
    token_rewards.scatter_add_(1, last, some)
