"""Reward placement: turns rewards of turns and whole rollouts into token rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from rlx.credit.kernels import select_masked
from rlx.errors import RlxError, ShapeError
from rlx.spec import OnMissingTurn, Placement, TurnReduce

__all__ = [
    "PlacedRewards",
    "TurnWithoutTokens",
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

        turn_proportional:  rₜ = R_k / n_k for t in turn k,  + G / n  on all n tokens
        turn_end:           rₜ = R_k on the last token of turn k,  + G on the row's last token
        final_token_only:   rₜ = Σₖ R_k + G on the row's last token

    Only mask tokens count, both for n and for "last". With `turn_reduce="mean"` every R_k is first
    divided by the number of rewarded turns, those without tokens included.

    Args:
        turn_rewards: `[B, K]` turn k at index k - 1; read only where `turn_present`.
        turn_present: `[B, K]` bool the turn was rewarded.
        global_rewards: `[B]` rewards of the whole rollout.
        turn_ids: `[B, T]` int64 turn number of each token, from 1; read only in the mask.
        mask: `[B, T]` bool tokens that may carry reward.
        placement: one of the rules above.
        turn_reduce: None is KG-R1's choice: "mean" for final_token_only, "sum" for the others.
        on_missing_turn: the reward of a turn without tokens is dropped, moved to the row's last
            token, or an error. final_token_only needs no tokens of a turn, so it loses nothing.

    Raises:
        TurnWithoutTokens: under `on_missing_turn="error"`.
        ShapeError: the tensors disagree.
        ValueError: an option has an unknown value.

    Reference:
        KG-R1, arXiv 2509.26383; turn_end is rlx's own.
    """
    reduce = turn_reduce or ("mean" if placement == "final_token_only" else "sum")
    _check_names(placement, reduce, on_missing_turn)
    _check_shapes(turn_rewards, turn_present, global_rewards, turn_ids, mask)
    turns = _reduce_turn_rewards(turn_rewards, turn_present, reduce)
    of_turns = [mask & (turn_ids == number) for number in range(1, turns.shape[1] + 1)]
    sizes = torch.stack([_count_tokens(tokens) for tokens in (*of_turns, mask)], dim=1)
    missing = turn_present & (sizes[:, :-1] == 0)
    if on_missing_turn == "error" and missing.any():
        row, column = missing.nonzero()[0].tolist()
        raise TurnWithoutTokens(row, turn=column + 1)
    token_rewards = _place_by_rule(placement, turns, global_rewards, of_turns, mask)
    homeless = torch.where(missing, turns, 0.0).sum(dim=1)
    if placement == "final_token_only":
        homeless = torch.zeros_like(homeless)
    elif on_missing_turn == "to_last_token":
        _add_to_last_token(token_rewards, mask, homeless)
        homeless = torch.zeros_like(homeless)
    lost = torch.where(sizes[:, -1] > 0, homeless, turns.sum(dim=1) + global_rewards)
    return PlacedRewards(token_rewards=token_rewards, missing=missing, lost=lost)


def _place_by_rule(
    placement: Placement,
    turns: Tensor,
    global_rewards: Tensor,
    of_turns: Sequence[Tensor],
    mask: Tensor,
) -> Tensor:
    """`[B, T]` token rewards; `of_turns` holds the tokens of each turn in the mask, `[B, T]`."""
    token_rewards = turns.new_zeros(mask.shape)
    owned = list(zip(of_turns, turns.unbind(dim=1), strict=True))
    match placement:
        case "turn_proportional":
            for tokens, rewards in (*owned, (mask, global_rewards)):
                shares = rewards / _count_tokens(tokens).clamp(min=1)
                token_rewards += select_masked(tokens, shares[:, None])
        case "turn_end":
            for tokens, rewards in (*owned, (mask, global_rewards)):
                _add_to_last_token(token_rewards, tokens, rewards)
        case "final_token_only":
            _add_to_last_token(token_rewards, mask, turns.sum(dim=1) + global_rewards)
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


def _count_tokens(tokens: Tensor) -> Tensor:
    """`[B]` how many of the `[B, T]` tokens are True."""
    return tokens.sum(dim=1, dtype=torch.int32)


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


def _check_names(placement: Placement, reduce: TurnReduce, on_missing_turn: OnMissingTurn) -> None:
    for option, value, names in (
        ("placement", placement, Placement),
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
