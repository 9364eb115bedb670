"""Reward placement: turns rewards of turns and whole rollouts into token rewards."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlx.credit.inputs import CreditInputs
from rlx.discovery import bind_implementation
from rlx.errors import RlxError, ShapeError
from rlx.plugin import Placement
from rlx.spec import OnMissingTurn, TurnReduce


class TurnWithoutTokens(RlxError):
    """A rewarded turn has no learning token, and the spec makes that an error."""

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
        token_rewards: `[B, T]`; exactly 0 outside the mask.
        missing: `[B, K]` bool the turn is rewarded and has no token in the mask, whatever the
            placement.
        lost: `[B]` reward that lies on no token. Placed and lost rewards add up to the input
            rewards.
    """

    token_rewards: Tensor
    missing: Tensor
    lost: Tensor


def place_rewards(
    inputs: CreditInputs,
    *,
    placement: Placement,
    turn_reduce: TurnReduce | None = None,
    on_missing_turn: OnMissingTurn = "drop",
) -> PlacedRewards:
    """Puts each row's rewards on its tokens.

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
    missing = inputs.turn_present & (reduced.turn_sizes == 0)
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
    return PlacedRewards(token_rewards=token_rewards, missing=missing, lost=lost)


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
