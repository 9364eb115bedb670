"""Reward placement: turns rewards of turns and whole rollouts into token rewards."""

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from rlx.credit.kernels import select_masked
from rlx.discovery import bind_implementation
from rlx.errors import RlxError, ShapeError
from rlx.plugin import Placement
from rlx.spec import OnMissingTurn, TurnReduce

__all__ = [
    "PlacedRewards",
    "PlacementInputs",
    "TurnWithoutTokens",
    "place_at_row_end",
    "place_at_turn_ends",
    "place_in_shares",
    "place_rewards",
    "sum_masked_returns",
    "sum_token_rewards",
]


class TurnWithoutTokens(RlxError):
    """A rewarded turn has no learning token, and the spec makes that an error.

    Attributes:
        row: index in the batch, from 0.
        turn: turn number, from 1.
    """

    def __init__(self, row: int, turn: int) -> None:
        super().__init__(
            f"row {row}, turn {turn}: rewarded, but no token of this turn learns; widen the mask, "
            "or set on_missing_turn to 'drop' or 'to_last_token'"
        )
        self.row, self.turn = row, turn


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedRewards:
    """Rewards on tokens, and the rewards that could not be placed.

    Attributes:
        token_rewards: `[B, T]` in the dtype of the rewards; exactly 0 outside the mask.
        missing: `[B, K]` bool the turn is rewarded and has no token in the mask. A fact about the
            batch, independent of the placement.
        lost: `[B]` reward that lies on no token: dropped turns, and everything in a row without
            mask tokens. Placed and lost rewards add up to the input rewards.
    """

    token_rewards: Tensor
    missing: Tensor
    lost: Tensor


@dataclass(frozen=True, eq=False)
class PlacementInputs:
    """The inputs of a placement. Only tokens of the mask may carry reward.

    Attributes:
        turn_rewards: `[B, K]` turn k at index k - 1, already divided by the number of rewarded
            turns if these are averaged; 0 if the turn is not rewarded.
        global_rewards: `[B]` rewards of the whole rollout.
        turn_ids: `[B, T]` int64 turn number of each token, from 1; read only in the mask.
        mask: `[B, T]` bool tokens that may carry reward.
    """

    turn_rewards: Tensor
    global_rewards: Tensor
    turn_ids: Tensor
    mask: Tensor

    @cached_property
    def turn_masks(self) -> tuple[Tensor, ...]:
        """`[B, T]` bool of each turn: its tokens."""
        turns = range(1, self.turn_rewards.shape[1] + 1)
        return tuple(self.mask & (self.turn_ids == number) for number in turns)

    @cached_property
    def _counts(self) -> Tensor:
        masks = (*self.turn_masks, self.mask)
        return torch.stack([tokens.sum(dim=1, dtype=torch.int32) for tokens in masks], 1)

    @property
    def turn_sizes(self) -> Tensor:
        """`[B, K]` int32 number of tokens of each turn."""
        return self._counts[:, :-1]

    @property
    def row_sizes(self) -> Tensor:
        """`[B]` int32 number of tokens in the mask."""
        return self._counts[:, -1]


def place_rewards(
    turn_rewards: Tensor,
    turn_present: Tensor,
    global_rewards: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
    *,
    placement: Placement,
    turn_reduce: TurnReduce | None = None,
    on_missing_turn: OnMissingTurn = "drop",
) -> PlacedRewards:
    """Puts each row's rewards on its tokens.

    With `turn_reduce="mean"` the reward of each turn is first divided by the number of rewarded
    turns, those without tokens included.

    Args:
        turn_rewards: `[B, K]` turn k at index k - 1; read only where `turn_present`.
        turn_present: `[B, K]` bool the turn was rewarded.
        global_rewards: `[B]` rewards of the whole rollout.
        turn_ids: `[B, T]` int64 turn number of each token, from 1; read only in the mask.
        mask: `[B, T]` bool tokens that may carry reward.
        placement: which tokens receive the rewards.
        turn_reduce: None is the placement's own.
        on_missing_turn: the reward of a turn without tokens is dropped, moved to the row's last
            token, or an error. A placement that needs no tokens of a turn loses nothing.

    Raises:
        TurnWithoutTokens: under `on_missing_turn="error"`.
        ShapeError: the tensors disagree.
        ValueError: an option has an unknown value.
        PluginError: the placement's implementation cannot be imported.
    """
    reduce = turn_reduce or placement.turn_reduce
    _check_names(reduce, on_missing_turn)
    _check_shapes(turn_rewards, turn_present, global_rewards, turn_ids, mask)
    turns = _reduce_turn_rewards(turn_rewards, turn_present, reduce)
    inputs = PlacementInputs(turns, global_rewards, turn_ids, mask)
    missing = turn_present & (inputs.turn_sizes == 0)
    if on_missing_turn == "error" and missing.any():
        row, column = missing.nonzero()[0].tolist()
        raise TurnWithoutTokens(row, turn=column + 1)

    token_rewards = bind_implementation(placement)(inputs)
    if token_rewards.shape != mask.shape:
        found = tuple(token_rewards.shape)
        raise ShapeError(f"the placement returned {found}, not {tuple(mask.shape)}")
    dropped = torch.where(missing, turns, 0.0).sum(dim=1) * placement.needs_turn_tokens
    if on_missing_turn == "to_last_token":
        _add_to_last_token(token_rewards, mask, dropped)
        dropped = torch.zeros_like(dropped)
    lost = torch.where(inputs.row_sizes > 0, dropped, turns.sum(dim=1) + global_rewards)
    return PlacedRewards(token_rewards=token_rewards, missing=missing, lost=lost)


def place_in_shares(inputs: PlacementInputs) -> Tensor:
    """`turn_proportional`: rₜ = R_k / n_k for t in turn k,  + G / n  on all n tokens.

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    overall = inputs.global_rewards / inputs.row_sizes.clamp(min=1)
    shares = inputs.turn_rewards / inputs.turn_sizes.clamp(min=1)
    token_rewards = select_masked(inputs.mask, overall[:, None])
    for tokens, share in zip(inputs.turn_masks, shares.unbind(1), strict=True):
        token_rewards += select_masked(tokens, share[:, None])
    return token_rewards


def place_at_turn_ends(inputs: PlacementInputs) -> Tensor:
    """`turn_end`: rₜ = R_k on the last token of turn k,  + G on the row's last token."""
    token_rewards = inputs.turn_rewards.new_zeros(inputs.mask.shape)
    for tokens, reward in zip(inputs.turn_masks, inputs.turn_rewards.unbind(1), strict=True):
        _add_to_last_token(token_rewards, tokens, reward)
    _add_to_last_token(token_rewards, inputs.mask, inputs.global_rewards)
    return token_rewards


def place_at_row_end(inputs: PlacementInputs) -> Tensor:
    """`final_token_only`: rₜ = Σₖ R_k + G on the row's last token.

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    token_rewards = inputs.turn_rewards.new_zeros(inputs.mask.shape)
    total = inputs.turn_rewards.sum(dim=1) + inputs.global_rewards
    _add_to_last_token(token_rewards, inputs.mask, total)
    return token_rewards


def sum_token_rewards(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """`[B]` sum of a row's token rewards, which is KG-R1's sum of token scores.

    Args:
        token_rewards: `[B, T]`.
        mask: `[B, T]` bool; nothing outside it is read.

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    return select_masked(mask, token_rewards).sum(dim=1)


def sum_masked_returns(returns: Tensor, mask: Tensor) -> Tensor:
    """`[B]` sum of a row's returns over its mask: what KG-R1 calls its score.

    For γ = λ = 1 and one reward R on the last of n tokens this is n · R, so it grows with length.

    Args:
        returns: `[B, T]` returns of the estimator; for an outcome estimator, its advantages.
        mask: `[B, T]` bool; nothing outside it is read.

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    return select_masked(mask, returns).sum(dim=1)


def _add_to_last_token(token_rewards: Tensor, tokens: Tensor, rewards: Tensor) -> None:
    """Adds `[B]` rewards in place to the last of the `[B, T]` tokens of each row that has any."""
    if tokens.shape[1] == 0:
        return
    at = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    last = (tokens * at).amax(dim=1, keepdim=True).long()
    some = torch.where(tokens.gather(1, last), rewards[:, None], 0.0)
    token_rewards.scatter_add_(1, last, some)


def _reduce_turn_rewards(turn_rewards: Tensor, turn_present: Tensor, reduce: TurnReduce) -> Tensor:
    """`[B, K]` rewards whose sum over k is the sum, or the mean, of the rewarded turns."""
    turns = torch.where(turn_present, turn_rewards, 0.0)
    if reduce == "mean":
        return turns / turn_present.sum(dim=1, keepdim=True).clamp(min=1)
    return turns


def _check_names(reduce: TurnReduce, on_missing_turn: OnMissingTurn) -> None:
    for option, value, names in (
        ("turn_reduce", reduce, TurnReduce),
        ("on_missing_turn", on_missing_turn, OnMissingTurn),
    ):
        if value not in get_args(names):
            raise ValueError(f"{option} is {value!r}, not one of {', '.join(get_args(names))}")


def _check_shapes(
    turn_rewards: Tensor,
    turn_present: Tensor,
    global_rewards: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
) -> None:
    rows, turns = turn_rewards.shape
    for name, tensor, expected in (
        ("turn_present", turn_present, (rows, turns)),
        ("global_rewards", global_rewards, (rows,)),
        ("turn_ids", turn_ids, (rows, *mask.shape[1:])),
        ("mask", mask, (rows, *turn_ids.shape[1:])),
    ):
        if tuple(tensor.shape) != expected:
            raise ShapeError(f"{name} is {tuple(tensor.shape)}, not {expected}")
