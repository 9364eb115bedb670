"""Estimators that use the structure of a rollout beyond GRPO: its first turn, states and tree."""

import torch
from torch import Tensor

from rlx.credit.grpo import compute_present_advantages, group_advantages, pair_ids
from rlx.credit.inputs import CreditInputs, spread_over_mask, spread_over_turns, total_scores
from rlx.spec import Gigpo, MtGrpo, TreeGrpo


def estimate_mt_grpo(inputs: CreditInputs, options: MtGrpo) -> Tensor:
    """The first turn learns from its own reward and the outcome, later turns from the outcome.

        turn 1:  Aᵢₜ = A_outcome + c · A_turn        later:  Aᵢₜ = A_outcome

    The first turn is the segment before the first result. The outcome is Σ global, which includes
    the rewards of later turns.

    Reference:
        MT-GRPO, arXiv 2505.11821.
    """
    rewards, present = inputs.turn_rewards, inputs.turn_present
    later = torch.where(present[:, 1:], rewards[:, 1:], 0.0).sum(dim=1)
    groups = inputs.group_ids[:, None].expand_as(present[:, :1])
    first = compute_present_advantages(rewards[:, :1], present[:, :1], groups, **options.comparison)
    outcome = group_advantages(
        inputs.global_rewards + later, inputs.group_ids, **options.comparison
    )
    return spread_over_turns(options.turn_coef * first, outcome, inputs.turn_ids, inputs.mask)


def estimate_gigpo(inputs: CreditInputs, options: Gigpo) -> Tensor:
    """Rollouts against rollouts of the prompt, plus turns against turns from the same state.

        Aᵢₜ = A_E(i) + ω · A_S(turn of t)

    An episode's score is the sum of its turn and global rewards. A turn's is its discounted return,
    and a turn that no other shares its state with adds 0.

    Reference:
        GiGPO, arXiv 2505.10978.
    """
    rewards, taken = torch.where(inputs.turn_present, inputs.turn_rewards, 0.0), inputs.state_ids
    returns = compute_step_returns(rewards, inputs.global_rewards, taken >= 0, options.gamma)
    states = pair_ids(inputs.group_ids[:, None].expand_as(taken), taken)
    alone = {**options.comparison, "singleton": "zero"}
    steps = compute_present_advantages(returns, taken >= 0, states, **alone)
    scores = rewards.sum(dim=1) + inputs.global_rewards
    episodes = group_advantages(scores, inputs.group_ids, **options.comparison)
    return spread_over_turns(options.omega * steps, episodes, inputs.turn_ids, inputs.mask)


def compute_step_returns(
    rewards: Tensor, global_rewards: Tensor, taken: Tensor, gamma: float
) -> Tensor:
    """Return from each turn on, discounted per turn; the outcome is paid at the last turn.

        Rₖ = Σ_{j≥k} γ^(j-k) · (rⱼ + [j is the last turn taken] · global)

    Args:
        rewards: `[B, K]`; an unrewarded turn earns 0.
        global_rewards: `[B]`.
        taken: `[B, K]` bool the rollout has such a turn.
        gamma: discount per turn.

    Returns:
        `[B, K]`; meaningful where `taken`.

    Reference:
        GiGPO, arXiv 2505.10978, equation 5.
    """
    is_last = taken & (taken.flip(1).cumsum(1).flip(1) == 1)
    rewards = rewards + torch.where(is_last, global_rewards[:, None], 0.0)
    steps = torch.arange(rewards.shape[1], dtype=torch.float64, device=rewards.device)
    discounts = (gamma ** (steps[:, None] - steps).clamp(min=0)).tril()
    # float64 keeps rounding from separating equal returns.
    return (rewards.double() @ discounts).to(rewards.dtype)


def estimate_tree_grpo(inputs: CreditInputs, options: TreeGrpo) -> Tensor:
    """A leaf against all leaves of its prompt, plus against the leaves of its own tree.

        Aᵢ = A_inter(leaves of the prompt) + A_intra(leaves of the tree)

    Leaves of a prompt are its rows of one level, and those of a tree are siblings. Rows that
    continue the prompt itself belong to no smaller tree: they are compared only once. The advantage
    is exactly 0 if all leaves of a prompt have equal scores.

    Reference:
        Tree-GRPO, arXiv 2509.21240.
    """
    scores, prompts = total_scores(inputs), pair_ids(inputs.tree_ids, inputs.levels)
    inter = group_advantages(scores, prompts, **options.comparison)
    intra = group_advantages(scores, pair_ids(prompts, inputs.group_ids), **options.comparison)
    return spread_over_mask(torch.where(inputs.levels == 0, inter, inter + intra), inputs.mask)
