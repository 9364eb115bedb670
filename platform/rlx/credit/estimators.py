"""Estimators under their YAML names: from `CreditInputs` and options to advantages.

Each is a thin wrapper around the tensor function with its formula; see there for details. `how`
holds the settings of the group comparison: ddof, eps, singleton, tolerance.
"""

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from rlx.credit import outcome, returns, turns
from rlx.credit.group import GroupAdvantageSettings, group_advantages
from rlx.credit.inputs import Credit, CreditInputs, spread_over_mask, total_scores
from rlx.credit.second_level import ema_scale, prompt_scale
from rlx.spec import (
    Alpha,
    ConfidenceSpec,
    EnvironmentTokens,
    Normalize,
    SecondLevel,
    TurnStatistics,
)

__all__ = [
    "estimate_dr_grpo",
    "estimate_gae",
    "estimate_gigpo",
    "estimate_gpg",
    "estimate_grpo",
    "estimate_mt_grpo",
    "estimate_multiturn_grpo",
    "estimate_opo",
    "estimate_pass_at_k",
    "estimate_reinforce_plus_plus",
    "estimate_reinforce_plus_plus_baseline",
    "estimate_remax",
    "estimate_rloo",
    "estimate_tree_grpo",
    "estimate_turn_level_gae",
    "estimate_two_level",
    "estimate_uniform",
    "estimate_vineppo",
]

# One score per row ------------------------------------------------------------------------------


def estimate_grpo(
    inputs: CreditInputs,
    *,
    normalize: Normalize = "std",
    enable_multiturn_advantage: bool = False,
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """Outcome GRPO: the row's score, normalised in its group, on each of its learning tokens.

        Aᵢₜ = (sᵢ - mean) / (σ + ε)

    With `enable_multiturn_advantage` it is `multiturn_grpo`, as in KG-R1.

    Reference:
        DeepSeekMath, arXiv 2402.03300, section 4.1; KG-R1, arXiv 2509.26383.
    """
    if enable_multiturn_advantage:
        return estimate_multiturn_grpo(inputs, **how)
    scores = total_scores(inputs)
    return spread_over_mask(
        group_advantages(scores, inputs.group_ids, normalize=normalize, **how), inputs.mask
    )


def estimate_uniform(inputs: CreditInputs, **how: Unpack[GroupAdvantageSettings]) -> Tensor:
    """GRPO on the structured score, independent of `credit.score_source`.

        Aᵢₜ = (sᵢ - mean) / (σ + ε)        sᵢ = meanₖ(turn rewardₖ) + Σ global

    Reference:
        KG-R1's `uniform_reward_mode`, as published in its code.
    """
    scores = total_scores(replace(inputs, score_source="structured"))
    return spread_over_mask(group_advantages(scores, inputs.group_ids, **how), inputs.mask)


def estimate_dr_grpo(inputs: CreditInputs, **how: Unpack[GroupAdvantageSettings]) -> Tensor:
    """GRPO without the division by σ; its loss divides by a constant length.

        Aᵢₜ = sᵢ - mean

    Reference:
        Dr. GRPO, arXiv 2503.20783.
    """
    return estimate_grpo(inputs, normalize="center", **how)


def estimate_rloo(inputs: CreditInputs, **how: Unpack[GroupAdvantageSettings]) -> Tensor:
    """`rlx.credit.outcome.compute_rloo_advantages` on each of the row's learning tokens."""
    return spread_over_mask(
        outcome.compute_rloo_advantages(total_scores(inputs), inputs.group_ids, **how), inputs.mask
    )


def estimate_opo(inputs: CreditInputs, **how: Unpack[GroupAdvantageSettings]) -> Tensor:
    """`rlx.credit.outcome.compute_opo_advantages`; a row's length is its number of mask tokens."""
    lengths = inputs.mask.sum(dim=1)
    return spread_over_mask(
        outcome.compute_opo_advantages(total_scores(inputs), lengths, inputs.group_ids, **how),
        inputs.mask,
    )


def estimate_gpg(
    inputs: CreditInputs,
    *,
    alpha: Alpha = "groups",
    f_norm: float = 1.0,
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """`rlx.credit.outcome.compute_gpg_advantages` on each of the row's learning tokens."""
    scores = total_scores(inputs)
    per_row = outcome.compute_gpg_advantages(
        scores, inputs.group_ids, alpha=alpha, f_norm=f_norm, **how
    )
    return spread_over_mask(per_row, inputs.mask)


def estimate_pass_at_k(
    inputs: CreditInputs, *, normalize: Normalize = "std", **how: Unpack[GroupAdvantageSettings]
) -> Tensor:
    """`rlx.credit.outcome.compute_pass_at_k_advantages` on each of the row's learning tokens."""
    scores = total_scores(inputs)
    per_row = outcome.compute_pass_at_k_advantages(
        scores, inputs.group_ids, normalize=normalize, **how
    )
    return spread_over_mask(per_row, inputs.mask)


def estimate_remax(inputs: CreditInputs) -> Tensor:
    """`rlx.credit.outcome.compute_remax_advantages`, with the greedy answer to the same prompt as
    baseline.
    """
    per_row = outcome.compute_remax_advantages(total_scores(inputs), inputs.stream("greedy_scores"))
    return spread_over_mask(per_row, inputs.mask)


# Turns and trees --------------------------------------------------------------------------------


def estimate_multiturn_grpo(
    inputs: CreditInputs,
    *,
    statistics: TurnStatistics = "pooled",
    turn_weight: float = 0.5,
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """`rlx.credit.turns.compute_multiturn_grpo_advantages`; ignores KL in the reward."""
    return turns.compute_multiturn_grpo_advantages(
        inputs.turn_rewards,
        inputs.turn_present,
        inputs.global_rewards,
        inputs.turn_ids,
        inputs.mask,
        inputs.group_ids,
        statistics=statistics,
        turn_weight=turn_weight,
        **how,
    )


def estimate_mt_grpo(
    inputs: CreditInputs, *, turn_coef: float = 1.0, **how: Unpack[GroupAdvantageSettings]
) -> Tensor:
    """`rlx.credit.turns.compute_mt_grpo_advantages`: the first turn's own reward, and the
    rewards of the rollout.

    The outcome is Σ global, which includes the rewards of later turns.
    """
    first, later = inputs.turn_rewards[:, 0], inputs.turn_rewards[:, 1:]
    present = inputs.turn_present[:, 1:]
    outcome_rewards = inputs.global_rewards + torch.where(present, later, 0.0).sum(dim=1)
    return turns.compute_mt_grpo_advantages(
        first,
        inputs.turn_present[:, 0],
        outcome_rewards,
        inputs.turn_ids,
        inputs.mask,
        inputs.group_ids,
        turn_coef=turn_coef,
        **how,
    )


def estimate_gigpo(
    inputs: CreditInputs,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    normalize: Normalize = "center",
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor:
    """`rlx.credit.turns.compute_gigpo_advantages`; an episode's score is the sum of its turn and
    global rewards.
    """
    rewards = torch.where(inputs.turn_present, inputs.turn_rewards, 0.0)
    steps = turns.compute_step_returns(
        inputs.turn_rewards,
        inputs.turn_present,
        inputs.global_rewards,
        inputs.state_ids >= 0,
        gamma=gamma,
    )
    return turns.compute_gigpo_advantages(
        rewards.sum(dim=1) + inputs.global_rewards,
        steps,
        inputs.state_ids,
        inputs.turn_ids,
        inputs.mask,
        inputs.group_ids,
        omega=omega,
        normalize=normalize,
        **how,
    )


def estimate_tree_grpo(
    inputs: CreditInputs, *, normalize: Normalize = "std", **how: Unpack[GroupAdvantageSettings]
) -> Tensor:
    """`rlx.credit.turns.compute_tree_grpo_advantages`: rows of one kind against all such rows of
    their prompt, plus against their siblings.

    Rows that continue the prompt itself belong to no smaller tree: their siblings are all such rows
    of the prompt, and they are compared only once.
    """
    prompts = inputs.tree_ids * (int(inputs.levels.max()) + 1) + inputs.levels
    both = turns.compute_tree_grpo_advantages(
        total_scores(inputs), prompts, inputs.group_ids, normalize=normalize, **how
    )
    once = group_advantages(total_scores(inputs), prompts, normalize=normalize, **how)
    return spread_over_mask(torch.where(inputs.levels == 0, once, both), inputs.mask)


def estimate_two_level(
    inputs: CreditInputs,
    *,
    normalize: Normalize = "std",
    confidence: ConfidenceSpec | None = None,
    second_level: SecondLevel = "none",
    momentum: float = 0.9,
    lambda_ans: float = 1.0,
    lambda_conf: float = 1.0,
    **how: Unpack[GroupAdvantageSettings],
) -> Tensor | Credit:
    """Compares answers within their prompt, and confidences within their answer.

        A_ans = λ_ans · norm over G_a         A_conf = λ_conf · second(norm over the G_c siblings)

    Groups come from the batch: the answers of a prompt form a group, and so do the
    confidences of an answer. Level 0 rows are answers, deeper rows confidences.

    Returns:
        `[B, T]` advantages, 0 outside the mask; with `ema_scale` also the running mean square.

    Reference:
        RLCR in two turns (RLCR: arXiv 2507.16806). To centre within an answer
        instead of dividing by σ: arXiv 2508.11800.
    """
    below = confidence or ConfidenceSpec()
    within: GroupAdvantageSettings = {
        "ddof": below.ddof,
        "eps": below.eps,
        "singleton": below.singleton,
        "tolerance": below.tolerance,
    }
    scores, groups, is_answer = total_scores(inputs), inputs.group_ids, inputs.levels == 0
    answers = group_advantages(scores, groups, normalize=normalize, **how)
    confidences = group_advantages(scores, groups, normalize=below.normalize, **within)
    scaled, state = _apply_second_level(
        confidences[~is_answer], inputs, second_level, momentum, within
    )
    confidences = confidences.masked_scatter(~is_answer, scaled)
    per_row = torch.where(is_answer, lambda_ans * answers, lambda_conf * confidences)
    advantages = spread_over_mask(per_row, inputs.mask)
    return Credit(advantages=advantages, state=state) if state else advantages


def _apply_second_level(
    advantages: Tensor,
    inputs: CreditInputs,
    level: SecondLevel,
    momentum: float,
    how: GroupAdvantageSettings,
) -> tuple[Tensor, dict[str, float]]:
    """Applies the second level to the advantages of confidences; returns its state as well."""
    prompts = inputs.tree_ids[inputs.levels > 0]
    ddof, eps = how["ddof"], how["eps"]
    match level:
        case "none":
            return advantages, {}
        case "prompt_scale":
            return prompt_scale(advantages, prompts, ddof=ddof, eps=eps), {}
        case "prompt_renorm":
            return group_advantages(advantages, prompts, ddof=ddof, eps=eps), {}
        case "ema_scale":
            before = inputs.state.get("mean_square")
            scaled, after = ema_scale(advantages, before, momentum=momentum, eps=eps)
            return scaled, {} if after is None else {"mean_square": after}


# Per token ---------------------------------------------------------------------------------------


def estimate_gae(
    inputs: CreditInputs,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    environment: EnvironmentTokens = "skip",
    whiten: bool = False,
) -> Credit:
    """`rlx.credit.returns.compute_gae_advantages` over the critic's values, optionally whitened.

    The critic's returns are those before whitening.
    """
    advantages, targets = returns.compute_gae_advantages(
        inputs.token_rewards,
        inputs.stream("values"),
        inputs.mask,
        gamma=gamma,
        lam=lam,
        environment=environment,
    )
    return Credit(advantages=_maybe_whiten(advantages, inputs.mask, whiten), returns=targets)


def estimate_turn_level_gae(
    inputs: CreditInputs,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    gamma_high: float = 1.0,
    lam_high: float = 1.0,
    whiten: bool = False,
) -> Credit:
    """`rlx.credit.returns.compute_turn_gae_advantages`, optionally whitened."""
    advantages, targets = returns.compute_turn_gae_advantages(
        inputs.token_rewards,
        inputs.stream("values"),
        inputs.mask,
        inputs.turn_ids,
        gamma=gamma,
        lam=lam,
        gamma_high=gamma_high,
        lam_high=lam_high,
    )
    return Credit(advantages=_maybe_whiten(advantages, inputs.mask, whiten), returns=targets)


def estimate_reinforce_plus_plus(
    inputs: CreditInputs, *, gamma: float = 1.0, whiten: bool = True
) -> Tensor:
    """Discounted returns, whitened over the batch.

        Aₜ = whiten(Σ_{s ≥ t} γˢ⁻ᵗ rₛ)

    Reference:
        REINFORCE++, arXiv 2501.03262.
    """
    to_come = returns.compute_discounted_returns(inputs.token_rewards, inputs.mask, gamma=gamma)
    return _maybe_whiten(to_come, inputs.mask, whiten)


def estimate_reinforce_plus_plus_baseline(
    inputs: CreditInputs, *, whiten: bool = True, **how: Unpack[GroupAdvantageSettings]
) -> Tensor:
    """The row's score minus its group's mean, whitened over the batch.

        Aₜ = whiten(sᵢ - mean)

    Reference:
        REINFORCE++-baseline, arXiv 2501.03262.
    """
    return _maybe_whiten(estimate_grpo(inputs, normalize="center", **how), inputs.mask, whiten)


def estimate_vineppo(inputs: CreditInputs) -> Tensor:
    """`rlx.credit.returns.compute_vine_advantages` on given Monte-Carlo values.

    The row's score is the reward of its last step, and the state after it has value 0.
    """
    values, steps = inputs.stream("mc_values"), inputs.stream("step_ids")
    numbers = torch.arange(values.shape[1] - 1, device=steps.device)
    is_last = numbers == steps.amax(dim=1, keepdim=True)
    rewards = torch.where(is_last, total_scores(inputs)[:, None], 0.0)
    advantages = returns.compute_vine_advantages(steps, values, rewards)
    return torch.where(inputs.mask, advantages, 0.0)


def _maybe_whiten(advantages: Tensor, mask: Tensor, wanted: bool) -> Tensor:
    return returns.whiten_values(advantages, mask) if wanted else advantages
