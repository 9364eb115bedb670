"""Estimators that use the structure of a rollout: its turns, their states, and its tree.

A turn's number is its column plus one. Tokens carry the number of their turn; tokens without a turn
(prompts, observations, padding) carry a number below 1 and get 0.
"""

from typing import Unpack

import torch
from torch import Tensor

from rlx.credit.group import GroupAdvantageSettings, group_advantages
from rlx.spec import Normalize, TurnStatistics

__all__ = [
    "compute_gigpo_advantages",
    "compute_mt_grpo_advantages",
    "compute_multiturn_grpo_advantages",
    "compute_step_returns",
    "compute_tree_grpo_advantages",
]


def compute_multiturn_grpo_advantages(
    turn_rewards: Tensor,
    turn_present: Tensor,
    global_rewards: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    statistics: TurnStatistics = "pooled",
    turn_weight: float = 0.5,
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """Each turn's reward against other turns of the prompt, plus its rollout's against the others.

        Aᵢₜ = w · (r_turn(t) - mean) / (σ + ε) + (globalᵢ - mean) / (σ + ε)
        pooled:    one mean and σ over all turns of all rollouts of the prompt
        per_turn:  one mean and σ over the k-th turns of the prompt, for each k

    Args:
        turn_rewards: `[B, K]`.
        turn_present: `[B, K]` bool; an unrewarded turn enters no mean and adds nothing.
        global_rewards: `[B]`.
        turn_ids: `[B, T]` number of the token's turn, from 1; below 1 for tokens of no turn.
        mask: `[B, T]` bool tokens that learn.
        group_ids: `[B]` rows with equal ids are compared.
        statistics: turns that share a mean and a deviation.
        turn_weight: w.
        how: options of `group_advantages`.

    Returns:
        `[B, T]`, 0 outside the mask and on tokens of no turn.

    Reference:
        KG-R1, arXiv 2509.26383: "pooled" as in its code, "per_turn" as in its text.
    """
    prompts = group_ids[:, None].expand_as(turn_present)
    numbers = torch.arange(turn_present.shape[1], device=group_ids.device)
    keys = (
        prompts if statistics == "pooled" else _build_pair_ids(prompts, numbers.expand_as(prompts))
    )
    turns = _compute_present_advantages(turn_rewards, turn_present, keys, **how)
    rollouts = group_advantages(global_rewards, group_ids, **how)
    return _spread_over_turns(turn_weight * turns, rollouts, turn_ids, mask)


def compute_mt_grpo_advantages(
    turn_rewards: Tensor,
    turn_present: Tensor,
    outcome_rewards: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    turn_coef: float = 1.0,
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """The first turn learns from its own reward and the outcome, later turns from the outcome.

        turn 1:  Aᵢₜ = A_outcome + c · A_turn        later:  Aᵢₜ = A_outcome

    Args:
        turn_rewards: `[B]` reward of the first turn, the segment before the first result.
        turn_present: `[B]` bool; a row without one enters no turn mean and has A_turn = 0.
        outcome_rewards: `[B]`.
        turn_ids: `[B, T]` number of the token's turn, from 1; below 1 for tokens of no turn.
        mask: `[B, T]` bool tokens that learn.
        group_ids: `[B]` rows with equal ids are compared.
        turn_coef: c.
        how: options of `group_advantages`.

    Returns:
        `[B, T]`, 0 outside the mask and on tokens of no turn.

    Reference:
        MT-GRPO, arXiv 2505.11821.
    """
    first = _compute_present_advantages(turn_rewards, turn_present, group_ids, **how)
    outcome = group_advantages(outcome_rewards, group_ids, **how)
    return _spread_over_turns(turn_coef * first[:, None], outcome, turn_ids, mask)


def compute_step_returns(
    turn_rewards: Tensor,
    turn_present: Tensor,
    global_rewards: Tensor,
    turn_taken: Tensor,
    *,
    gamma: float = 0.95,
) -> Tensor:
    """Return from each turn on, discounted per turn; the outcome is paid at the last turn.

        Rₖ = Σ_{j≥k} γ^(j-k) · (rⱼ + [j is the last turn taken] · global)

    Args:
        turn_rewards: `[B, K]`.
        turn_present: `[B, K]` bool the turn was rewarded; an unrewarded turn earns 0.
        global_rewards: `[B]`.
        turn_taken: `[B, K]` bool the rollout has such a turn.
        gamma: discount per turn.

    Returns:
        `[B, K]`; meaningful where `turn_taken`.

    Reference:
        GiGPO, arXiv 2505.10978, equation 5.
    """
    is_last = turn_taken & (turn_taken.flip(1).cumsum(1).flip(1) == 1)
    rewards = torch.where(turn_present, turn_rewards, 0.0)
    rewards = rewards + torch.where(is_last, global_rewards[:, None], 0.0)
    steps = torch.arange(rewards.shape[1], dtype=torch.float64, device=rewards.device)
    discounts = (gamma ** (steps[:, None] - steps).clamp(min=0)).tril()
    # float64 keeps rounding from separating equal returns.
    return (rewards.double() @ discounts).to(rewards.dtype)


def compute_gigpo_advantages(
    episode_scores: Tensor,
    returns: Tensor,
    state_ids: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    omega: float = 1.0,
    normalize: Normalize = "center",
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """Rollouts against rollouts of the prompt, plus turns against turns from the same state.

        Aᵢₜ = A_E(i) + ω · A_S(turn of t)

    Args:
        episode_scores: `[B]`.
        returns: `[B, K]` discounted returns of `compute_step_returns`.
        state_ids: `[B, K]` state in which a turn began; within a prompt, equal ids are the same
            state. Below 0 if the rollout has no such turn.
        turn_ids: `[B, T]` number of the token's turn, from 1; below 1 for tokens of no turn.
        mask: `[B, T]` bool tokens that learn.
        group_ids: `[B]` rows with equal ids are compared.
        omega: ω.
        normalize: for both parts, "std" divides by the deviation, "center" does not.
        how: options of `group_advantages`.

    Returns:
        `[B, T]`, 0 outside the mask and on tokens of no turn.

    Reference:
        GiGPO, arXiv 2505.10978.
    """
    states = _build_pair_ids(group_ids[:, None].expand_as(state_ids), state_ids)
    alone: GroupAdvantageSettings = {**how, "singleton": "zero"}
    steps = _compute_present_advantages(
        returns, state_ids >= 0, states, normalize=normalize, **alone
    )
    episodes = group_advantages(episode_scores, group_ids, normalize=normalize, **how)
    return _spread_over_turns(omega * steps, episodes, turn_ids, mask)


def compute_tree_grpo_advantages(
    scores: Tensor,
    group_ids: Tensor,
    tree_ids: Tensor,
    *,
    normalize: Normalize = "std",
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """A leaf against all leaves of its prompt, plus against the leaves of its own tree.

        Aᵢ = A_inter(leaves of the prompt) + A_intra(leaves of the tree)

    Args:
        scores: `[B]` one per leaf.
        group_ids: `[B]` rows with equal ids answer the same prompt.
        tree_ids: `[B]` within a prompt, rows with equal ids are leaves of the same tree.
        normalize: for both parts, "std" divides by the deviation, "center" does not.
        how: options of `group_advantages`.

    Returns:
        `[B]`; exactly 0 if all leaves of a prompt have equal scores.

    Reference:
        Tree-GRPO, arXiv 2509.21240.
    """
    inter = group_advantages(scores, group_ids, normalize=normalize, **how)
    intra = group_advantages(
        scores,
        _build_pair_ids(group_ids, tree_ids),
        normalize=normalize,
        **how,
    )
    return inter + intra


def _build_pair_ids(one: Tensor, other: Tensor) -> Tensor:
    """Ids in the shape of both inputs, equal where both ids are equal."""
    slots: Tensor = one.unique(return_inverse=True)[1]
    names, other_slots = other.unique(return_inverse=True)
    pairs: Tensor = slots * len(names) + other_slots
    return pairs


def _compute_present_advantages(
    values: Tensor,
    present: Tensor,
    keys: Tensor,
    *,
    normalize: Normalize = "std",
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """Group advantages among the present values, in the shape of `values`; 0 where absent."""
    advantages = group_advantages(
        values[present],
        keys[present],
        normalize=normalize,
        **how,
    )
    return torch.zeros_like(values).masked_scatter(present, advantages)


def _spread_over_turns(per_turn: Tensor, per_row: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
    """`[B, K]` and `[B]` to `[B, T]`: a token gets the value of its row plus that of any turn."""
    # A leading column of zeros serves the tokens whose turn has no column.
    table = torch.nn.functional.pad(per_turn, (1, 0))
    known = (turn_ids >= 1) & (turn_ids <= per_turn.shape[1])
    tokens = table.gather(1, torch.where(known, turn_ids, 0)) + per_row[:, None]
    return torch.where(mask & (turn_ids >= 1), tokens, 0.0)
