"""Credit along the tokens of a row: GAE, discounted returns, and steps with known values.

Time is counted in learning tokens. Tokens of an environment between them take no time, except in
the literal recursion of KG-R1 (arXiv 2509.26383).

A recursion Aₜ = xₜ + c·Aₜ₊₁ is computed block by block, as a product with the triangle of powers
of c. It never divides by a power, so any c in [0, 1] and any length are safe.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlx.credit.rows import map_row_blocks, select_masked
from rlx.errors import ShapeError
from rlx.spec import EnvironmentTokens

__all__ = [
    "TokenAdvantages",
    "compute_discounted_returns",
    "compute_gae_advantages",
    "compute_turn_gae_advantages",
    "compute_vine_advantages",
    "fill_between_ends",
    "whiten_values",
]


class TokenAdvantages(NamedTuple):
    """Advantages and returns of tokens, `[B, T]` each, 0 outside the mask."""

    advantages: Tensor
    returns: Tensor


_BLOCK = 32
"""Tokens of a row per matrix product."""


def compute_gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    environment: EnvironmentTokens = "skip",
) -> TokenAdvantages:
    """Generalised advantage estimation, not whitened.

        δₜ = rₜ + γ Vₜ₊₁ - Vₜ          Aₜ = δₜ + γλ Aₜ₊₁          returnₜ = Aₜ + Vₜ

    V and A are 0 after the row's last learning token.

    Args:
        token_rewards: `[B, T]`.
        values: `[B, T]` the critic's estimate before the token's reward.
        mask: `[B, T]` bool tokens that learn.
        gamma: discount per token.
        lam: λ.
        environment: "skip": t + 1 is the next learning token, and others are ignored. "literal":
            t + 1 is the next position, so that rewards and values between the first and the last
            learning token count even if they do not learn.

    Returns:
        `[B, T]` advantages and `[B, T]` returns, 0 outside the mask.

    Raises:
        ShapeError: the shapes differ.

    Reference:
        arXiv 1506.02438, equation 16; the literal recursion: KG-R1, arXiv 2509.26383.
    """
    _check_shapes(token_rewards=token_rewards, values=values, mask=mask)
    recursion = partial(_accumulate_gae, gamma=gamma, lam=lam)

    def compute_gae_block(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        steps = mask if environment == "skip" else fill_between_ends(mask)
        rewards, values = select_masked(steps, rewards, values)
        advantages = _apply_on_steps(recursion, steps, rewards, values)
        return advantages, values.add_(advantages)

    return TokenAdvantages(
        *map_row_blocks(compute_gae_block, token_rewards, values, mask, inside=mask)
    )


def compute_discounted_returns(token_rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted returns, as in REINFORCE++.

        Gₜ = Σ_{s ≥ t} γˢ⁻ᵗ rₛ         s and t count the row's learning tokens

    Args:
        token_rewards: `[B, T]`, minus β·KL if KL is part of the reward.
        mask: `[B, T]` bool tokens that learn.
        gamma: discount per token.

    Returns:
        `[B, T]` in the dtype of `token_rewards`, 0 outside the mask; not whitened.

    Raises:
        ShapeError: the shapes differ.

    Reference:
        REINFORCE++, arXiv 2501.03262.
    """
    _check_shapes(token_rewards=token_rewards, mask=mask)

    def compute_returns_block(rewards: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        (rewards,) = select_masked(mask, rewards)
        return (_apply_on_steps(partial(_decayed_sums, factor=gamma), mask, rewards),)

    (returns,) = map_row_blocks(compute_returns_block, token_rewards, mask, inside=mask)
    return returns


def compute_turn_gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    gamma_high: float = 1.0,
    lam_high: float = 1.0,
) -> TokenAdvantages:
    """GAE over the last tokens of turns, then over the tokens within each turn, not whitened.

        last token e of turn k:   Aₑ = δₑ + γ_high λ_high Aₑ'     δₑ = rₑ + γ_high (ρ + Vₑ') - Vₑ
        any other token t:        Aₜ = δₜ + γλ Aₜ₊₁              δₜ = rₜ + γ Vₜ₊₁ - Vₜ

    e' is the last token of turn k + 1 and ρ the reward of turn k + 1 before e'. The
    reference pays at last tokens only (ρ = 0). KL in the reward pays everywhere, and ρ passes it
    on to the earlier turns.

    With γ = γ_high = 1 and λ = λ_high = 1 this equals token-level GAE; likewise if each turn is one
    token and both levels agree, or if there is one turn.

    Args:
        token_rewards: `[B, T]`.
        values: `[B, T]` the critic's estimate before the token's reward.
        mask: `[B, T]` bool tokens that learn; others are not time steps.
        turn_ids: `[B, T]` int64 turn of the token. A turn is contiguous, apart from tokens that
            do not learn.
        gamma: discount per token within a turn.
        lam: λ within a turn.
        gamma_high: discount per turn.
        lam_high: λ from turn to turn. The reference uses one λ for both.

    Returns:
        `[B, T]` advantages and `[B, T]` returns, 0 outside the mask.

    Raises:
        ShapeError: the shapes differ.

    Reference:
        Bi-level GAE of VAGEN and RAGEN (arXiv 2504.20073), as published in their code.
    """
    _check_shapes(token_rewards=token_rewards, values=values, mask=mask, turn_ids=turn_ids)
    recursion = partial(
        _accumulate_turn_gae, gamma=gamma, lam=lam, gamma_high=gamma_high, lam_high=lam_high
    )

    def compute_turn_block(
        rewards: Tensor, values: Tensor, mask: Tensor, turns: Tensor
    ) -> tuple[Tensor, ...]:
        rewards, values, turns = select_masked(mask, rewards, values, turns)
        advantages = _apply_on_steps(recursion, mask, rewards, values, turns, mask)
        return advantages, values.add_(advantages)

    return TokenAdvantages(
        *map_row_blocks(compute_turn_block, token_rewards, values, mask, turn_ids, inside=mask)
    )


def compute_vine_advantages(step_ids: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
    """The change in success probability by each reasoning step, on all of its tokens.

        Aₛ = rₛ + V̂(s + 1) - V̂(s)

    Args:
        step_ids: `[B, T]` int64 step of the token, from 0; -1 for tokens outside, which get 0.
        values: `[B, S + 1]` Monte-Carlo values of the states at the step boundaries: step s leads
            from s to s + 1. The state after a finished response has value 0.
        rewards: `[B, S]` reward of the step.

    Returns:
        `[B, T]` in the dtype of `values`. Steps without tokens may hold any value.

    Raises:
        ShapeError: the shapes differ, or a token belongs to a step without a reward.

    Reference:
        VinePPO, arXiv 2410.01679, section 4.
    """
    rows, steps = rewards.shape
    if values.shape != (rows, steps + 1) or len(step_ids) != rows:
        raise ShapeError(
            f"step_ids is {tuple(step_ids.shape)}, values {tuple(values.shape)} and rewards "
            f"{tuple(rewards.shape)}; they must be [B, T], [B, S + 1] and [B, S]"
        )
    if (step_ids >= steps).any():
        raise ShapeError(f"step_ids names step {int(step_ids.max())}, rewards has {steps} steps")
    per_step = rewards + values[:, 1:] - values[:, :-1]
    # An extra column of zeros serves the tokens that belong to no step.
    return pad(per_step, (0, 1)).gather(1, torch.where(step_ids < 0, steps, step_ids))


def whiten_values(
    values: Tensor, mask: Tensor, *, ddof: int = 1, eps: float = 1e-8, shift_mean: bool = True
) -> Tensor:
    """Scales to mean 0 and variance 1 over the mask of the whole batch.

        (x - mean) / √(variance + ε)          shift_mean=False adds the mean back

    Args:
        values: `[B, T]`.
        mask: `[B, T]` bool.
        ddof: the variance is the sum of squares over n - ddof.
        eps: added to the variance.
        shift_mean: whether the mean stays subtracted.

    Returns:
        `[B, T]` in the dtype of `values`, 0 outside the mask. Equal values, or a single one,
        deviate by exactly 0.

    Raises:
        ShapeError: the shapes differ.
    """
    _check_shapes(values=values, mask=mask)
    chosen = values[mask]
    if len(chosen) == 0:
        return torch.zeros_like(values)
    mean = chosen.mean()
    centred = chosen - mean
    variance = centred.square().sum() / max(len(chosen) - ddof, 1)
    whitened = centred * (variance + eps).rsqrt() + (0 if shift_mean else mean)
    alike = torch.zeros_like(chosen) if shift_mean else chosen
    # The mean of equal numbers can miss them by a rounding error, which √ε alone would magnify.
    whitened = torch.where(chosen.amax() == chosen.amin(), alike, whitened)
    return torch.zeros_like(values).masked_scatter(mask, whitened)


# Recursions over rows of consecutive steps -------------------------------------------------------


def _accumulate_gae(rewards: Tensor, values: Tensor, *, gamma: float, lam: float) -> Tensor:
    deltas = rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    return _decayed_sums(deltas, gamma * lam)


def _accumulate_turn_gae(
    rewards: Tensor,
    values: Tensor,
    turns: Tensor,
    present: Tensor,
    *,
    gamma: float,
    lam: float,
    gamma_high: float,
    lam_high: float,
) -> Tensor:
    ends = present & ((turns != _shift_left(turns)) | ~_shift_left(present))
    zero = values.new_zeros(())
    inside = _chained_sums(torch.where(ends, zero, rewards), torch.where(ends, zero, zero + 1))
    _, turn_returns = compute_gae_advantages(
        rewards + gamma_high * _shift_left(inside), values, ends, gamma=gamma_high, lam=lam_high
    )
    onward = torch.where(ends, turn_returns, rewards + gamma * _shift_left(values))
    return _chained_sums(onward - values, torch.where(ends, zero, zero + gamma * lam))


def _decayed_sums(x: Tensor, factor: float) -> Tensor:
    """`[B, T]` Aₜ = xₜ + factor · Aₜ₊₁.

    A matrix product computes each block. The first A of each block then obeys the same recursion
    with factor^block, and later blocks reach into a block through the first A after it.
    """
    width, short = x.shape[1], -x.shape[1] % _BLOCK
    within, beyond = _compute_decay_powers(factor, x.dtype, x.device)
    sums = (pad(x, (0, short)) if short else x).unflatten(1, (-1, _BLOCK)) @ within
    if width > _BLOCK:
        behind = _shift_left(_decayed_sums(sums[:, :, 0], factor**_BLOCK))
        sums.addcmul_(behind[:, :, None], beyond)
    inner: Tensor = sums.flatten(1)[:, :width]
    return inner


@lru_cache(maxsize=64)
def _compute_decay_powers(
    factor: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`[block, block]` weight of token j in token i ≤ j, and `[block]` that of the next block."""
    at = torch.arange(_BLOCK, dtype=torch.float64, device=device)
    ahead = at[:, None] - at[None, :]
    within = torch.where(ahead >= 0, factor ** ahead.clamp(min=0), 0.0)
    return within.to(dtype), (factor ** (_BLOCK - at)).to(dtype)


def _chained_sums(x: Tensor, factors: Tensor) -> Tensor:
    """`[B, T]` Aₜ = xₜ + factorsₜ · Aₜ₊₁, by doubling the distance that each token covers."""
    reach = 1
    while reach < x.shape[1]:
        x = torch.addcmul(x, factors, _shift_left(x, reach))
        factors = factors * _shift_left(factors, reach)
        reach *= 2
    return x


def _shift_left(x: Tensor, by: int = 1) -> Tensor:
    """The column `by` places to the right; 0 past the end."""
    return pad(x[:, by:], (0, by))


# Selecting the steps -----------------------------------------------------------------------------


def _apply_on_steps(recursion: Callable[..., Tensor], steps: Tensor, *streams: Tensor) -> Tensor:
    """Applies `recursion` to the steps only, `[B, T]`; positions outside of them are undefined.

    It receives the steps of a row as consecutive columns. The streams are 0 outside the steps.
    """
    ones = steps.view(torch.int8)
    begins = (ones[:, 1:] > ones[:, :-1]).sum(dim=1, dtype=torch.int32) + ones[:, :1].sum(dim=1)
    if (begins <= 1).all():
        return recursion(*streams)
    # A step goes to the column of its number among the steps, from 1. Everything else goes to
    # column 0, which is never read.
    counts = steps.cumsum(dim=1)
    width = int(counts[:, -1].max()) + 1
    (numbers,) = select_masked(steps, counts)
    packed = (x.new_zeros(len(x), width).scatter_(1, numbers, x)[:, 1:] for x in streams)
    return pad(recursion(*packed), (1, 0)).gather(1, numbers)


def fill_between_ends(mask: Tensor) -> Tensor:
    """`[B, T]` bool from the first to the last true position of the row: the range that the literal
    recursion of `compute_gae_advantages` reads.
    """
    begun = mask.cumsum(dim=1) > 0
    unfinished = mask.flip(1).cumsum(dim=1).flip(1) > 0
    return begun & unfinished


def _check_shapes(**tensors: Tensor) -> None:
    (first, *others) = ((name, tuple(x.shape)) for name, x in tensors.items())
    for name, shape in others:
        if shape != first[1]:
            raise ShapeError(f"{name} is {shape}, {first[0]} is {first[1]}")
