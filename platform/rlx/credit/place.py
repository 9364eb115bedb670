"""Placement: the rewards of turns and of whole rollouts become rewards of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rlx.errors import RlxError, ShapeError

__all__ = [
    "OnMissingTurn",
    "Placed",
    "Placement",
    "TurnReduce",
    "TurnWithoutTokens",
    "mass",
    "place",
    "returns_score",
]

Placement = Literal["turn_proportional", "final_token_only", "turn_end"]
TurnReduce = Literal["sum", "mean"]
OnMissingTurn = Literal["drop", "to_last_token", "error"]


class TurnWithoutTokens(RlxError):
    """A rewarded turn has no token that learns, and the spec says that this ends the run.

    Attributes:
        row: of the batch, from 0.
        turn: its number, from 1.
    """

    def __init__(self, row: int, turn: int) -> None:
        super().__init__(
            f"row {row}, turn {turn}: rewarded, but no token of this turn learns; widen the mask, "
            "or set on_missing_turn to 'drop' or 'to_last_token'"
        )
        self.row, self.turn = row, turn


@dataclass(frozen=True, eq=False, kw_only=True)
class Placed:
    """Rewards on tokens, and what found no token.

    Attributes:
        token_rewards: `[B, T]` in the dtype of the rewards; exactly 0 outside the mask.
        missing: `[B, K]` bool the turn is rewarded and has no token in the mask. A fact about the
            batch, whatever the placement made of it.
        lost: `[B]` reward that lies on no token: dropped turns, and everything in a row without any
            token in its mask. What was placed and what was lost add up to what was given.
    """

    token_rewards: Tensor
    missing: Tensor
    lost: Tensor


def place(
    turn_rewards: Tensor,
    turn_present: Tensor,
    global_rewards: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
    *,
    placement: Placement,
    turn_reduce: TurnReduce | None = None,
    on_missing_turn: OnMissingTurn = "drop",
) -> Placed:
    """Puts each row's rewards on its tokens.

        turn_proportional:  rₜ = R_k / n_k where t is of turn k,  + G / n  on all n tokens
        turn_end:           rₜ = R_k on the last token of turn k,  + G on the row's last token
        final_token_only:   rₜ = Σₖ R_k + G on the row's last token

    Only tokens in the mask count, for n as for "last". With `turn_reduce="mean"` every R_k is first
    divided by the number of rewarded turns, those without tokens included.

    Args:
        turn_rewards: `[B, K]` turn number k at k - 1; read only where `turn_present`.
        turn_present: `[B, K]` bool the turn was rewarded.
        global_rewards: `[B]` rewards of the whole rollout.
        turn_ids: `[B, T]` int64 turn number of each token, from 1; read only in the mask.
        mask: `[B, T]` bool tokens that may carry reward.
        placement: where rewards go.
        turn_reduce: None is the source's own: "mean" for final_token_only, "sum" for the others.
        on_missing_turn: a rewarded turn without tokens loses its reward, gives it to the row's last
            token, or is an error. final_token_only needs no tokens of a turn, so it loses nothing.

    Raises:
        TurnWithoutTokens: under `on_missing_turn="error"`.
        ShapeError: the tensors disagree.
        ValueError: an option is none of its names.

    Reference:
        Design 000, section 1.2 step 3 and section 3; turn_end is ours.
    """
    needs_turns = placement != "final_token_only"
    reduce = turn_reduce or ("sum" if needs_turns else "mean")
    _check_names(placement, reduce, on_missing_turn)
    _check_shapes(turn_rewards, turn_present, global_rewards, turn_ids, mask)
    slot = torch.where(mask & (turn_ids > 0) & (turn_ids <= turn_rewards.shape[1]), turn_ids, 0)
    sizes = _sizes(slot, turn_rewards.shape[1])
    missing = turn_present & (sizes == 0)
    if on_missing_turn == "error" and missing.any():
        row, column = missing.nonzero()[0].tolist()
        raise TurnWithoutTokens(row, turn=column + 1)

    turns = _reduced(turn_rewards, turn_present, reduce)
    token_rewards = _RULES[placement](turns, global_rewards, _Tokens(slot, sizes, mask))
    dropped = _on(missing & needs_turns, turns).sum(dim=1)
    if on_missing_turn == "to_last_token":
        token_rewards = token_rewards + _on(_final(mask), dropped)
        dropped = torch.zeros_like(dropped)
    lost = torch.where(mask.any(dim=1), dropped, turns.sum(dim=1) + global_rewards)
    return Placed(token_rewards=token_rewards, missing=missing, lost=lost)


def mass(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """`[B]` sum of a row's token rewards: the source's sum of token scores.

    Args:
        token_rewards: `[B, T]`.
        mask: `[B, T]` bool; nothing outside it is read.

    Reference:
        Design 000, section 1.2 step 6.
    """
    return _on(mask, token_rewards).sum(dim=1)


def returns_score(returns: Tensor, mask: Tensor) -> Tensor:
    """`[B]` sum of a row's returns over its mask: what the source calls its score.

    For γ = λ = 1 and one reward R on the last of n tokens this is n · R, so it grows with length.

    Args:
        returns: `[B, T]` of the estimator; of an outcome estimator, its advantages.
        mask: `[B, T]` bool; nothing outside it is read.

    Reference:
        Design 000, section 1.2 step 6.
    """
    return _on(mask, returns).sum(dim=1)


class _Tokens(NamedTuple):
    """Where rewards may go: `slot` `[B, T]` is the turn of a token in the mask, or 0; `sizes`
    `[B, K]` counts the tokens of each turn."""

    slot: Tensor
    sizes: Tensor
    mask: Tensor


def _turn_proportional(turns: Tensor, overall: Tensor, tokens: _Tokens) -> Tensor:
    own = turns / tokens.sizes.clamp(min=1)
    shared = overall / tokens.mask.sum(dim=1).clamp(min=1)
    return _of_turn(own, tokens.slot) + _on(tokens.mask, shared)


def _turn_end(turns: Tensor, overall: Tensor, tokens: _Tokens) -> Tensor:
    ends = _last_of_each(tokens.slot, turns.shape[1])
    return _on(ends, _of_turn(turns, tokens.slot)) + _on(_final(tokens.mask), overall)


def _final_token_only(turns: Tensor, overall: Tensor, tokens: _Tokens) -> Tensor:
    return _on(_final(tokens.mask), turns.sum(dim=1) + overall)


_RULES: dict[Placement, Callable[[Tensor, Tensor, _Tokens], Tensor]] = {
    "turn_proportional": _turn_proportional,
    "turn_end": _turn_end,
    "final_token_only": _final_token_only,
}


def _reduced(turn_rewards: Tensor, turn_present: Tensor, reduce: TurnReduce) -> Tensor:
    """`[B, K]` of which the sum over k is the sum, or the mean, of the rewarded turns."""
    turns = _on(turn_present, turn_rewards)
    if reduce == "mean":
        return turns / turn_present.sum(dim=1, keepdim=True).clamp(min=1)
    return turns


def _sizes(slot: Tensor, turns: int) -> Tensor:
    """`[B, K]` tokens of each turn; slot 0 is no turn's."""
    counts = slot.new_zeros(len(slot), turns + 1)
    return counts.scatter_add(1, slot, slot.new_ones(()).expand_as(slot))[:, 1:]


def _of_turn(per_turn: Tensor, slot: Tensor) -> Tensor:
    """`[B, K]` to `[B, T]`: each token gets its own turn's value, 0 where it has no turn."""
    return torch.nn.functional.pad(per_turn, (1, 0)).gather(1, slot)


def _last_of_each(slot: Tensor, slots: int) -> Tensor:
    """`[B, T]` bool the last token of each slot from 1 to `slots`."""
    position = torch.arange(slot.shape[1], device=slot.device).expand_as(slot)
    nowhere = slot.new_full((len(slot), slots + 1), -1)
    last = nowhere.scatter_reduce(1, slot, position, "amax")
    return (slot > 0) & (last.gather(1, slot) == position)


def _final(mask: Tensor) -> Tensor:
    return _last_of_each(mask.to(torch.int64), 1)


def _on(where: Tensor, value: Tensor) -> Tensor:
    """`[B]` or `[B, T]` to `[B, T]`, selected and not multiplied, so that NaN cannot leak."""
    wide = value if value.dim() == where.dim() else value[:, None]
    return torch.where(where, wide, value.new_zeros(()))


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
