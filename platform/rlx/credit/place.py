"""Reward placement: turns rewards of turns and whole rollouts into token rewards."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlx.credit.rows import map_row_blocks, select_masked
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
    rule = partial(
        _place_row_block, placement=placement, to_last_token=on_missing_turn == "to_last_token"
    )
    turns = _reduce_turn_rewards(turn_rewards, turn_present, reduce)
    token_rewards, sizes, length = map_row_blocks(
        rule, turns, turn_present, global_rewards, turn_ids, mask
    )
    missing = turn_present & (sizes == 0)
    if on_missing_turn == "error" and missing.any():
        row, column = missing.nonzero()[0].tolist()
        raise TurnWithoutTokens(row, turn=column + 1)
    stays = placement == "final_token_only" or on_missing_turn == "to_last_token"
    dropped = turns.new_zeros(()) if stays else _sum_masked(missing, turns)
    lost = torch.where(length > 0, dropped, turns.sum(dim=1) + global_rewards)
    return PlacedRewards(token_rewards=token_rewards, missing=missing, lost=lost)


def sum_token_rewards(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """`[B]` sum of a row's token rewards, which is KG-R1's sum of token scores.

    Args:
        token_rewards: `[B, T]`.
        mask: `[B, T]` bool; nothing outside it is read.

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    return _sum_masked(mask, token_rewards)


def sum_masked_returns(returns: Tensor, mask: Tensor) -> Tensor:
    """`[B]` sum of a row's returns over its mask: what KG-R1 calls its score.

    For γ = λ = 1 and one reward R on the last of n tokens this is n · R, so it grows with length.

    Args:
        returns: `[B, T]` returns of the estimator; for an outcome estimator, its advantages.
        mask: `[B, T]` bool; nothing outside it is read.

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    return _sum_masked(mask, returns)


def _sum_masked(mask: Tensor, values: Tensor) -> Tensor:
    """`[B]` sum of a row's values over the mask."""
    (selection,) = select_masked(mask, values)
    return selection.sum(dim=1)


def _place_row_block(
    turns: Tensor,
    present: Tensor,
    overall: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
    *,
    placement: Placement,
    to_last_token: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """For a block of rows: token rewards, tokens of each turn, and tokens in the mask."""
    tokens = _RewardableTokens.from_turn_ids(turn_ids, mask, turns=turns.shape[1])
    token_rewards = _RULES[placement](turns, overall, tokens)
    if to_last_token and placement != "final_token_only":
        missing = present & (tokens.sizes == 0)
        token_rewards += tokens.put(tokens.ends().final, _sum_masked(missing, turns))
    return token_rewards, tokens.sizes, tokens.length


class _LastTokens(NamedTuple):
    """Flat indices among all `B · T` tokens, -1 if there is none: `[B, K]` each turn's last token,
    and `[B]` the row's last token.
    """

    of_turns: Tensor
    final: Tensor


@dataclass(frozen=True, eq=False)
class _RewardableTokens:
    """Tokens that may carry rewards, in a block of rows.

    Attributes:
        cell: `[B, T]` int32 index of a token's cell in a flat `[B, K + 3]` table: column 0 outside
            the mask, k + 1 for a token of turn k, 1 or K + 2 for a token of no turn.
        owners: `[R]` the cell of each run of tokens that share a cell.
        runs: `[R]` number of tokens of each run.
        sizes: `[B, K]` tokens of each turn.
        length: `[B]` tokens in the mask.
    """

    cell: Tensor
    owners: Tensor
    runs: Tensor
    sizes: Tensor
    length: Tensor

    @classmethod
    def from_turn_ids(cls, turn_ids: Tensor, mask: Tensor, turns: int) -> "_RewardableTokens":
        """Counts by runs: neighbours mostly share a cell, so there are few runs."""
        rows, columns = len(mask), turns + 3
        (column,) = select_masked(mask, turn_ids.to(torch.int32).clamp_(0, turns + 1).add_(1))
        first = torch.arange(0, rows * columns, columns, dtype=torch.int32, device=mask.device)
        cell = column.add_(first[:, None])
        owners, runs = cell.flatten().unique_consecutive(return_counts=True)
        counts = runs.new_zeros(rows * columns).index_add_(0, owners, runs).view(rows, columns)
        return cls(cell, owners, runs, counts[:, 2:-1], counts[:, 1:].sum(dim=1))

    def ends(self) -> _LastTokens:
        """Finds the last tokens."""
        rows, turns = self.sizes.shape
        nowhere = self.runs.new_full((rows * (turns + 3),), -1)
        last = self.runs.cumsum(0) - 1
        ends = nowhere.scatter_reduce(0, self.owners.long(), last, "amax").view(rows, -1)
        return _LastTokens(of_turns=ends[:, 2:-1], final=ends[:, 1:].amax(dim=1))

    def look_up(self, table: Tensor) -> Tensor:
        """Gathers `[B, K + 3]` to `[B, T]`."""
        return table.flatten().index_select(0, self.cell.flatten()).view(self.cell.shape)

    def put(self, places: Tensor, values: Tensor) -> Tensor:
        """`[B, T]` zeros with each value added at its place; -1 is skipped."""
        there, flat = places >= 0, values.new_zeros(self.cell.numel())
        return flat.index_add_(0, places[there], values[there]).view(self.cell.shape)


def _turn_proportional(turns: Tensor, overall: Tensor, tokens: _RewardableTokens) -> Tensor:
    own = turns / tokens.sizes.clamp(min=1)
    shared = overall / tokens.length.clamp(min=1)
    return tokens.look_up(pad(pad(own, (1, 1)) + shared[:, None], (1, 0)))


def _turn_end(turns: Tensor, overall: Tensor, tokens: _RewardableTokens) -> Tensor:
    ends = tokens.ends()
    return tokens.put(ends.of_turns, turns) + tokens.put(ends.final, overall)


def _final_token_only(turns: Tensor, overall: Tensor, tokens: _RewardableTokens) -> Tensor:
    return tokens.put(tokens.ends().final, turns.sum(dim=1) + overall)


_RULES: dict[Placement, Callable[[Tensor, Tensor, _RewardableTokens], Tensor]] = {
    "turn_proportional": _turn_proportional,
    "turn_end": _turn_end,
    "final_token_only": _final_token_only,
}


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
