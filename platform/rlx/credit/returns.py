"""Credit along the tokens of a row: GAE, discounted returns, and steps with known values.

Time is counted in learning tokens. Tokens of an environment between them take no time, except in
the literal recursion of KG-R1 (arXiv 2509.26383).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlx.credit.grpo import compute_group_extremes, group_advantages, has_score_spread, pair_ids
from rlx.credit.inputs import Credit, CreditInputs, spread_over_mask, total_scores
from rlx.errors import ShapeError
from rlx.spec import (
    EnvironmentTokens,
    Gae,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    TurnLevelGae,
    VinePpo,
)

_BLOCK = 32
"""Tokens of a row per matrix product."""


# Recursions along rows --------------------------------------------------------------------------
# Aₜ = xₜ + c·Aₜ₊₁ is computed block by block, as a product with the triangle of powers of c. It
# never divides by a power, so any c in [0, 1] and any length are safe.


def compute_decayed_sums(x: Tensor, factor: float) -> Tensor:
    """`[B, T]` Aₜ = xₜ + factor · Aₜ₊₁.

    A matrix product computes each block. The first A of each block obeys the same recursion with
    factor^block, and later blocks reach into a block through the first A after it.
    """
    width, short = x.shape[1], -x.shape[1] % _BLOCK
    within, beyond = _compute_decay_powers(factor, x.dtype, x.device)
    sums = (pad(x, (0, short)) if short else x).unflatten(1, (-1, _BLOCK)) @ within
    if width > _BLOCK:
        behind = shift_left(compute_decayed_sums(sums[:, :, 0], factor**_BLOCK))
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


def compute_chained_sums(x: Tensor, factors: Tensor) -> Tensor:
    """`[B, T]` Aₜ = xₜ + factorsₜ · Aₜ₊₁, by doubling the distance that each token covers."""
    reach = 1
    while reach < x.shape[1]:
        x = torch.addcmul(x, factors, shift_left(x, reach))
        factors = factors * shift_left(factors, reach)
        reach *= 2
    return x


def shift_left(x: Tensor, by: int = 1) -> Tensor:
    """The column `by` places to the right; 0 past the end."""
    return pad(x[:, by:], (0, by))


def apply_on_steps(recursion: Callable[..., Tensor], steps: Tensor, *streams: Tensor) -> Tensor:
    """Applies a recursion on `[B, T']` to the steps of each row, as if nothing stood between them.
    `streams` are `[B, T]`, 0 outside the steps, where the result is undefined."""
    ones = steps.view(torch.int8)
    begins = (ones[:, 1:] > ones[:, :-1]).sum(dim=1, dtype=torch.int32) + ones[:, :1].sum(dim=1)
    if (begins <= 1).all():  # nothing stands between the steps
        return recursion(*streams)
    # A step goes to the column of its number among the steps, from 1. Everything else goes to
    # column 0, which is never read.
    counts = steps.cumsum(dim=1)
    width = int(counts[:, -1].max()) + 1
    numbers = torch.where(steps, counts, 0)
    packed = (x.new_zeros(len(x), width).scatter_(1, numbers, x)[:, 1:] for x in streams)
    return pad(recursion(*packed), (1, 0)).gather(1, numbers)


_DEFAULTS = Gae()
LEAST_VARIANCE = 1e-8
"""Added to the path variance of a step."""


class TokenAdvantages(NamedTuple):
    """Advantages and returns of tokens, `[B, T]` each, 0 outside the mask."""

    advantages: Tensor
    returns: Tensor


def estimate_gae(inputs: CreditInputs, options: Gae) -> Credit:
    """Generalised advantage estimation over the critic's values, optionally whitened.

        δₜ = rₜ + γ Vₜ₊₁ - Vₜ          Aₜ = δₜ + γλ Aₜ₊₁          returnₜ = Aₜ + Vₜ

    V and A are 0 after the row's last learning token. The critic's returns are those before
    whitening.

    Reference:
        arXiv 1506.02438, equation 16; the literal recursion: KG-R1, arXiv 2509.26383.
    """
    advantages, returns = compute_gae_advantages(
        inputs.token_rewards,
        inputs.stream("values"),
        inputs.mask,
        gamma=options.gamma,
        lam=options.lam,
        environment=options.environment,
    )
    if options.whiten:
        advantages = whiten_values(advantages, inputs.mask)
    return Credit(advantages=advantages, returns=returns)


def compute_gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = _DEFAULTS.gamma,
    lam: float = _DEFAULTS.lam,
    environment: EnvironmentTokens = _DEFAULTS.environment,
) -> TokenAdvantages:
    """The formula of `estimate_gae`, not whitened.

    Args:
        values: `[B, T]` the critic's estimate before the token's reward.
        mask: `[B, T]` bool tokens that learn.
        environment: "skip": t + 1 is the next learning token, and others are ignored. "literal": t
            + 1 is the next position, so that rewards and values between the first and the last
            learning token count even if they do not learn.
    """

    def estimate_on_steps(rewards: Tensor, values: Tensor) -> Tensor:
        deltas = rewards - values
        deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
        return compute_decayed_sums(deltas, gamma * lam)

    steps = mask if environment == "skip" else fill_between_ends(mask)
    rewards, values = torch.where(steps, token_rewards, 0.0), torch.where(steps, values, 0.0)
    advantages = apply_on_steps(estimate_on_steps, steps, rewards, values)
    return TokenAdvantages(
        torch.where(mask, advantages, 0.0), torch.where(mask, advantages + values, 0.0)
    )


def estimate_turn_level_gae(inputs: CreditInputs, options: TurnLevelGae) -> Credit:
    """GAE over the last tokens of turns, then over the tokens within each turn.

        last token e of turn k:   Aₑ = δₑ + γ_high λ_high Aₑ'     δₑ = rₑ + γ_high (ρ + Vₑ') - Vₑ
        any other token t:        Aₜ = δₜ + γλ Aₜ₊₁              δₜ = rₜ + γ Vₜ₊₁ - Vₜ

    e' is the last token of turn k + 1 and ρ the reward of turn k + 1 before e'. The
    reference pays at last tokens only (ρ = 0). KL in the reward pays everywhere, and ρ passes it
    on to the earlier turns. A turn is contiguous, apart from tokens that do not learn, which are no
    time steps. The reference uses one λ for both levels.

    With γ = γ_high = 1 and λ = λ_high = 1 this equals token-level GAE; likewise if each turn is one
    token and both levels agree, or if there is one turn.

    Reference:
        Bi-level GAE of VAGEN and RAGEN (arXiv 2504.20073), as published in their code.
    """

    def estimate_on_steps(
        rewards: Tensor, values: Tensor, turns: Tensor, present: Tensor
    ) -> Tensor:
        ends = present & ((turns != shift_left(turns)) | ~shift_left(present))
        zero = values.new_zeros(())
        inside = compute_chained_sums(
            torch.where(ends, zero, rewards), torch.where(ends, zero, zero + 1)
        )
        turn_returns = compute_gae_advantages(
            rewards + options.gamma_high * shift_left(inside),
            values,
            ends,
            gamma=options.gamma_high,
            lam=options.lam_high,
            environment="skip",
        ).returns
        onward = torch.where(ends, turn_returns, rewards + options.gamma * shift_left(values))
        decay = torch.where(ends, zero, zero + options.gamma * options.lam)
        return compute_chained_sums(onward - values, decay)

    mask, turns = inputs.mask, torch.where(inputs.mask, inputs.turn_ids, 0)
    rewards = torch.where(mask, inputs.token_rewards, 0.0)
    values = torch.where(mask, inputs.stream("values"), 0.0)
    found = apply_on_steps(estimate_on_steps, mask, rewards, values, turns, mask)
    advantages = torch.where(mask, found, 0.0)
    returns = torch.where(mask, found + values, 0.0)
    if options.whiten:
        advantages = whiten_values(advantages, mask)
    return Credit(advantages=advantages, returns=returns)


def estimate_reinforce_plus_plus(inputs: CreditInputs, options: ReinforcePlusPlus) -> Tensor:
    """Discounted returns, whitened over the batch.

        Aₜ = whiten(Σ_{s ≥ t} γˢ⁻ᵗ rₛ)         s and t count the row's learning tokens

    Reference:
        REINFORCE++, arXiv 2501.03262.
    """
    mask = inputs.mask
    rewards = torch.where(mask, inputs.token_rewards, 0.0)
    sums = apply_on_steps(lambda x: compute_decayed_sums(x, options.gamma), mask, rewards)
    returns = torch.where(mask, sums, 0.0)
    return whiten_values(returns, mask) if options.whiten else returns


def estimate_reinforce_plus_plus_baseline(
    inputs: CreditInputs, options: ReinforcePlusPlusBaseline
) -> Tensor:
    """The row's score minus its group's mean, whitened over the batch.

        Aₜ = whiten(sᵢ - mean)

    Reference:
        REINFORCE++-baseline, arXiv 2501.03262.
    """
    centred = group_advantages(total_scores(inputs), inputs.group_ids, **options.comparison)
    advantages = spread_over_mask(centred, inputs.mask)
    return whiten_values(advantages, inputs.mask) if options.whiten else advantages


def estimate_vineppo(inputs: CreditInputs, options: VinePpo) -> Tensor:
    """The change in success probability by each reasoning step, on all of its tokens.

        Aₛ = rₛ + V̂(s + 1) - V̂(s)

    V̂ are Monte-Carlo values: step s leads from state s to s + 1. The row's score is the reward of
    its last step, and the state after it has value 0.

    Raises:
        ShapeError: the values do not cover the steps.

    Reference:
        VinePPO, arXiv 2410.01679, section 4.
    """
    values, steps = inputs.stream("mc_values"), inputs.stream("step_ids")
    count = values.shape[1] - 1
    if (steps >= count).any():
        raise ShapeError(f"step_ids names step {int(steps.max())}, mc_values has {count} steps")
    is_last = torch.arange(count, device=steps.device) == steps.amax(dim=1, keepdim=True)
    rewards = torch.where(is_last, total_scores(inputs)[:, None], 0.0)
    per_step = rewards + values[:, 1:] - values[:, :-1]
    # An extra column of zeros serves the tokens that belong to no step.
    tokens = pad(per_step, (0, 1)).gather(1, torch.where(steps < 0, count, steps))
    return torch.where(inputs.mask, tokens, 0.0)


def estimate_optimal_token_baseline(inputs: CreditInputs, options: OptimalTokenBaseline) -> Tensor:
    """Rewards-to-go minus their mean in the group at the same step, weighted by path variance.

        Aᵢₜ = Gᵢₜ - Σⱼ Wⱼₜ Gⱼₜ / Σⱼ Wⱼₜ        Wᵢₜ = Σ_{s≤t} (1 - 2 πᵢₛ + Σ π²)

    t counts the row's learning tokens, and j runs over the rows of the group that have a t-th one.
    W estimates the squared norm of the gradient of a row's log-probability up to t, so the baseline
    is the one of least variance. A step that only one row of the group reaches gets 0 or, with
    `singleton: raw`, G.

    Reference:
        The Optimal Token Baseline, arXiv 2602.07078; for several turns, as published in verl.
    """
    mask = inputs.mask
    rewards = torch.where(mask, inputs.token_rewards, 0.0)
    chosen, collisions = inputs.stream("old_logprobs").exp(), inputs.stream("collision_probs")
    energies = (1 - 2 * chosen + collisions).clamp(min=0)  # never below (1 - π)²
    variance = torch.where(mask, energies, 0.0).cumsum(dim=1)[mask].to(rewards.dtype)
    returns = compute_decayed_sums(rewards, 1.0)[mask]
    steps = pair_ids(inputs.group_ids[:, None].expand(mask.shape), mask.cumsum(dim=1))
    _, slot, counts = steps[mask].unique(return_inverse=True, return_counts=True)
    zeros = returns.new_zeros(len(counts))
    # Deviations from the plain mean: equal returns then have a baseline without rounding error.
    centred = returns - (zeros.index_add(0, slot, returns) / counts)[slot]
    weight = zeros.index_add(0, slot, variance) + LEAST_VARIANCE
    baseline = zeros.index_add(0, slot, variance * centred) / weight
    spread = has_score_spread(*compute_group_extremes(returns, slot, len(counts)))
    advantages = torch.where(spread[slot], centred - baseline[slot], 0.0)
    if options.singleton == "raw":
        advantages = torch.where(counts[slot] == 1, returns, advantages)
    return torch.zeros_like(inputs.token_rewards).masked_scatter(mask, advantages)


def whiten_values(values: Tensor, mask: Tensor) -> Tensor:
    """Scales `[B, T]` values to mean 0 and variance 1 over the mask of the whole batch; 0 outside.
    Equal values, or a single one, become exactly 0.

        (x - mean) / √(variance + 1e-8)          variance = Σ (x - mean)² / (n - 1)
    """
    chosen = values[mask]
    if len(chosen) == 0 or chosen.amax() == chosen.amin():
        # The mean of equal numbers can miss them by a rounding error, which √ε would magnify.
        return torch.zeros_like(values)
    centred = chosen - chosen.mean()
    variance = centred.square().sum() / (len(chosen) - 1)
    return torch.zeros_like(values).masked_scatter(mask, centred * (variance + 1e-8).rsqrt())


def fill_between_ends(mask: Tensor) -> Tensor:
    """`[B, T]` bool from the first to the last true position of the row."""
    begun = mask.cumsum(dim=1) > 0
    unfinished = mask.flip(1).cumsum(dim=1).flip(1) > 0
    return begun & unfinished
