"""Estimators on one score per rollout, with other baselines or scales than GRPO."""

import torch
from torch import Tensor

from rlx.credit.grpo import compute_present_advantages, group_advantages, pair_ids
from rlx.credit.inputs import CreditInputs, spread_over_mask, total_scores
from rlx.credit.returns import compute_decayed_sums, whiten_values
from rlx.spec import Gdpo, Gpg, MaxRl, Opo, PassAtK, Remax, Rloo


def estimate_gdpo(inputs: CreditInputs, options: Gdpo) -> Tensor:
    """Each named reward normalised on its own within its group, then their weighted sum.

        aᵢ = Σₙ wₙ · (rᵢₙ - meanₙ) / (σₙ + ε)
        rows:    Aᵢ = (aᵢ - mean) / (σ + ε) over the rows of the batch
        tokens:  Aᵢₜ = whiten(aᵢ) over the learning tokens of the batch, as in verl
        none:    Aᵢ = aᵢ

    A reward that a row lacks enters no mean and adds nothing. Under "rows", a row with aᵢ = 0 stays
    exactly 0; "tokens" subtracts a mean that weighs rows by their length, so it does not.

    Reference:
        GDPO, arXiv 2601.05242, equations 4 to 6.
    """
    rewards = inputs.stream("named_rewards")
    names = torch.arange(rewards.shape[1], device=rewards.device).expand(rewards.shape)
    groups = pair_ids(inputs.group_ids[:, None].expand(rewards.shape), names)
    each = compute_present_advantages(rewards, ~rewards.isnan(), groups, **options.comparison)
    sums = each @ each.new_tensor(inputs.reward_weights)
    match options.renormalize:
        case "rows":
            everything = torch.zeros_like(inputs.group_ids)
            scaled = group_advantages(sums, everything, ddof=options.ddof, eps=options.eps)
            return spread_over_mask(torch.where(sums == 0, 0.0, scaled), inputs.mask)
        case "tokens":
            return whiten_values(spread_over_mask(sums, inputs.mask), inputs.mask)
        case "none":
            return spread_over_mask(sums, inputs.mask)


def estimate_rloo(inputs: CreditInputs, options: Rloo) -> Tensor:
    """Score minus the mean of the other scores in its group, an unbiased baseline.

        Aᵢ = sᵢ - mean_{j≠i} sⱼ = n / (n - 1) · (sᵢ - mean)

    Reference:
        RLOO, arXiv 2402.14740.
    """
    advantages = group_advantages(total_scores(inputs), inputs.group_ids, **options.comparison)
    return spread_over_mask(advantages, inputs.mask)


def estimate_maxrl(inputs: CreditInputs, options: MaxRl) -> Tensor:
    """Score minus the mean of its group, divided by that mean: rare successes weigh more.

        Aᵢ = (sᵢ - mean) / (mean + ε)

    With scores of 0 and 1 it estimates the gradient of the log-likelihood of success. A group whose
    mean is not above 0 has no success to learn from, and gets 0.

    Reference:
        MaxRL, arXiv 2602.02710, algorithm 1.
    """
    scores, groups = total_scores(inputs), inputs.group_ids
    centred = group_advantages(scores, groups, **options.comparison)
    _, slot, counts = groups.unique(return_inverse=True, return_counts=True)
    means = (scores.new_zeros(len(counts)).index_add(0, slot, scores) / counts)[slot]
    alone = counts[slot] == 1
    advantages = torch.where(alone, centred, centred / (means + options.eps))
    return spread_over_mask(torch.where(alone | (means > 0), advantages, 0.0), inputs.mask)


def estimate_opo(inputs: CreditInputs, options: Opo) -> Tensor:
    """Score minus the length-weighted mean of its group, the minimum-variance baseline.

        Aᵢ = sᵢ - Σⱼ Lⱼ sⱼ / Σⱼ Lⱼ

    A row's length L is its number of mask tokens. A group without any uses the plain mean.

    Reference:
        OPO, arXiv 2505.23585.
    """
    # Deviations from the plain mean are exact zeros for equal scores, and the weighted baseline
    # is the plain mean plus the weighted mean of the deviations.
    scores = total_scores(inputs)
    centred = group_advantages(scores, inputs.group_ids, **options.comparison)
    _, slot, counts = inputs.group_ids.unique(return_inverse=True, return_counts=True)
    zeros = scores.new_zeros(len(counts))
    lengths = inputs.mask.sum(dim=1).to(scores.dtype)
    tokens = zeros.index_add(0, slot, lengths).clamp(min=1)
    baseline = zeros.index_add(0, slot, lengths * centred) / tokens
    advantages = centred - torch.where(counts == 1, 0.0, baseline)[slot]
    return spread_over_mask(advantages, inputs.mask)


def estimate_gpg(inputs: CreditInputs, options: Gpg) -> Tensor:
    """Score minus the mean of its group, scaled up to make up for rows or groups without signal.

        Aᵢ = α · (sᵢ - mean) / F_norm
        scores:  α = rows / rows whose score is not 0
        groups:  α = groups / groups whose scores differ

    α counts over all rows of the optimiser step: "groups" as in the paper, "scores" as in verl.

    Reference:
        GPG, arXiv 2504.02546.
    """
    scores, groups = total_scores(inputs), inputs.group_ids
    centred = group_advantages(scores, groups, **options.comparison)
    if options.alpha == "scores":
        everything, counted = len(scores), int((scores != 0).sum())
    else:
        everything, counted = len(groups.unique()), len(groups[centred != 0].unique())
    scale = everything / max(counted, 1) / options.f_norm
    return spread_over_mask(centred * scale, inputs.mask)


def estimate_pass_at_k(inputs: CreditInputs, options: PassAtK) -> Tensor:
    """Only the best row of a group learns, by its lead over the second best.

        std:     A_best = (s_best - s_second) / (σ + ε)        all others 0
        center:  A_best = s_best - s_second

    The advantage is exactly 0 if several rows share the best score, and in a group of one.

    Reference:
        Pass@k policy gradient, arXiv 2503.19595.
    """
    # The lead in advantage equals the lead in score over σ + ε: the mean cancels.
    advantages = group_advantages(total_scores(inputs), inputs.group_ids, **options.comparison)
    _, slot, counts = inputs.group_ids.unique(return_inverse=True, return_counts=True)
    lowest = advantages.new_full((len(counts),), -torch.inf)
    best = lowest.scatter_reduce(0, slot, advantages, "amax")
    is_best = advantages == best[slot]
    others = advantages.masked_fill(is_best, -torch.inf)
    second = lowest.scatter_reduce(0, slot, others, "amax")
    winners = torch.zeros_like(counts).index_add(0, slot, is_best.to(counts.dtype))
    has_lead = (winners == 1) & (counts > 1)
    lead = torch.where(is_best & has_lead[slot], (best - second)[slot], 0.0)
    return spread_over_mask(lead, inputs.mask)


def estimate_remax(inputs: CreditInputs, options: Remax) -> Tensor:
    """Score minus the score of the greedy answer to the same prompt.

        score:  Aᵢ = sᵢ - s_greedy
        to_go:  Aᵢₜ = Σ_{s≥t} rᵢₛ - s_greedy        rewards as placed on tokens, as in verl

    Reference:
        ReMax, arXiv 2310.10505.
    """
    greedy = inputs.stream("greedy_scores")
    if options.returns == "score":
        return spread_over_mask(total_scores(inputs) - greedy, inputs.mask)
    returns = compute_decayed_sums(torch.where(inputs.mask, inputs.token_rewards, 0.0), 1.0)
    return torch.where(inputs.mask, returns - greedy[:, None], 0.0)
