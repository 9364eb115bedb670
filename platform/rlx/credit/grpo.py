"""GRPO, the estimators that only add turns to it, and two-level credit: scores compared in groups.

A group of equal scores carries no signal and gets exact zeros. Rounding must not give it one:
twelve float32 scores of 0.7 miss their own mean by 1e-7, which divided by a deviation of 1e-7 plus
an epsilon of 1e-6 would give an advantage of 0.1.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlx.credit.inputs import (
    Credit,
    CreditInputs,
    spread_over_mask,
    spread_over_turns,
    total_scores,
)
from rlx.plugin import Estimator
from rlx.spec import (
    DrGrpo,
    Gigpo,
    Grpo,
    MtGrpo,
    MultiturnGrpo,
    Normalize,
    Singleton,
    TreeGrpo,
    TwoLevel,
    Uniform,
)

ROUNDING = 16
"""Scores within this many units in the last place count as equal: a reward that was spread over
tokens, or averaged over turns, comes back with an error of a few units.
"""
_DEFAULTS = Grpo()
_TWO_LEVEL = TwoLevel()


def estimate_grpo(inputs: CreditInputs, options: Grpo) -> Tensor:
    """Outcome GRPO: the row's score, normalised in its group, on each of its learning tokens.

        Aᵢₜ = (sᵢ - mean) / (σ + ε)

    With `baseline: prompt`, the group is all rows of the prompt's tree on the row's level.
    With `enable_multiturn_advantage` it is `multiturn_grpo`, as in KG-R1.

    Reference:
        DeepSeekMath, arXiv 2402.03300, section 4.1; KG-R1, arXiv 2509.26383.
    """
    if options.enable_multiturn_advantage:
        return estimate_multiturn_grpo(inputs, options.multiturn)
    groups = assign_comparison_groups(inputs, inputs.levels > 0, options)
    advantages = group_advantages(total_scores(inputs), groups, **options.comparison)
    return spread_over_mask(advantages, inputs.mask)


def assign_comparison_groups(
    inputs: CreditInputs, is_confidence: Tensor, options: Estimator
) -> Tensor:
    """`[B]` ids of the groups whose rows an estimator compares: rows that continue the same turn,
    or with `baseline: prompt` all rows of a prompt on one level. The options of
    `two_level.confidence` apply to the `[B]` bool rows `is_confidence`."""
    if isinstance(options, TwoLevel):
        of_confidences, of_answers = options.confidence.baseline, options.baseline
    else:
        of_confidences = of_answers = getattr(options, "baseline", "siblings")
    by_prompt = torch.where(is_confidence, of_confidences == "prompt", of_answers == "prompt")
    groups = inputs.group_ids
    prompts = pair_ids(inputs.tree_ids, inputs.levels) + groups.max() + 1
    return torch.where(by_prompt, prompts, groups)


def estimate_dr_grpo(inputs: CreditInputs, options: DrGrpo) -> Tensor:
    """GRPO without the division by σ; its loss divides by a constant length.

        Aᵢₜ = sᵢ - mean

    Reference:
        Dr. GRPO, arXiv 2503.20783.
    """
    advantages = group_advantages(total_scores(inputs), inputs.group_ids, **options.comparison)
    return spread_over_mask(advantages, inputs.mask)


def estimate_uniform(inputs: CreditInputs, options: Uniform) -> Tensor:
    """GRPO on the structured score, independent of `credit.score_source`.

        Aᵢₜ = (sᵢ - mean) / (σ + ε)        sᵢ = meanₖ(turn rewardₖ) + Σ global

    Reference:
        KG-R1's `uniform_reward_mode`, as published in its code.
    """
    scores = total_scores(replace(inputs, score_source="structured"))
    advantages = group_advantages(scores, inputs.group_ids, **options.comparison)
    return spread_over_mask(advantages, inputs.mask)


def estimate_multiturn_grpo(inputs: CreditInputs, options: MultiturnGrpo) -> Tensor:
    """Each turn's reward against other turns of the prompt, plus its rollout's against the others.

        Aᵢₜ = w · (r_turn(t) - mean) / (σ + ε) + (globalᵢ - mean) / (σ + ε)
        pooled:    one mean and σ over all turns of all rollouts of the prompt
        per_turn:  one mean and σ over the k-th turns of the prompt, for each k

    An unrewarded turn enters no mean and adds nothing. KL in the reward is ignored.

    Reference:
        KG-R1, arXiv 2509.26383: "pooled" as in its code, "per_turn" as in its text.
    """
    rewards, present = inputs.turn_rewards, inputs.turn_present
    groups = inputs.group_ids[:, None].expand_as(present)
    if options.statistics == "per_turn":
        numbers = torch.arange(present.shape[1], device=groups.device)
        groups = pair_ids(groups, numbers.expand_as(groups))
    turns = compute_present_advantages(rewards, present, groups, **options.comparison)
    rollouts = group_advantages(inputs.global_rewards, inputs.group_ids, **options.comparison)
    return spread_over_turns(options.turn_weight * turns, rollouts, inputs.turn_ids, inputs.mask)


def group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    normalize: Normalize = _DEFAULTS.normalize,
    ddof: int = _DEFAULTS.ddof,
    eps: float = _DEFAULTS.eps,
    singleton: Singleton = _DEFAULTS.singleton,
    tolerance: float = _DEFAULTS.tolerance,
) -> Tensor:
    """Score minus the mean of its group, optionally divided by a deviation.

        std:            Aᵢ = (sᵢ - mean) / (σ + ε)
        center:         Aᵢ = sᵢ - mean
        leave_one_out:  Aᵢ = sᵢ - mean_{j≠i} sⱼ = n / (n - 1) · (sᵢ - mean)
        batch_std:      Aᵢ = (sᵢ - mean) / (σ of all scores + ε)

    Args:
        scores: `[B]`.
        group_ids: `[B]` rows with equal ids are compared; any order, any group size.
        normalize: one of the rules above: GRPO, Dr. GRPO, RLOO, Lite PPO.
        ddof, eps: σ² is the sum of squares over n - ddof; eps is added to σ.
        singleton: advantage in a group of one: 0, or the raw score (mean 0, group σ 1, as in verl).
        tolerance: a group whose scores differ by at most this much has no signal.

    Returns:
        `[B]` in the dtype of `scores`; exactly 0 in a group whose scores are equal up to rounding;
        NaN in a group that holds NaN.

    Reference:
        DeepSeekMath (GRPO), arXiv 2402.03300, section 4.1; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv
        2402.14740; σ of the batch: Lite PPO, arXiv 2508.08221.

    Example:
        >>> group_advantages(torch.tensor([1, 0, .5]), torch.tensor([4, 4, 4]), normalize="center")
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    _, slot, counts = group_ids.unique(return_inverse=True, return_counts=True)
    zeros = scores.new_zeros(len(counts))
    highest, lowest = compute_group_extremes(scores, slot, len(counts))
    centred = scores - (zeros.scatter_add(0, slot, scores) / counts).index_select(0, slot)
    sizes = counts.index_select(0, slot)
    match normalize:
        case "std":
            squares = zeros.scatter_add(0, slot, centred.square())
            deviation = (squares / (counts - ddof).clamp(min=1)).sqrt()
            scale = deviation.index_select(0, slot) + eps
            advantages, raw = centred / scale, scores / (1 + eps)
        case "batch_std":
            squares = (scores - scores.mean()).square().sum()  # of all, not of a group
            scale = (squares / max(len(scores) - ddof, 1)).sqrt() + eps
            advantages, raw = centred / scale, scores / scale
        case "leave_one_out":
            advantages, raw = centred * sizes / (sizes - 1).clamp(min=1), scores
        case "center":
            advantages, raw = centred, scores
    has_signal = has_score_spread(highest, lowest, tolerance).index_select(0, slot)
    advantages = torch.where(has_signal, advantages, scores.new_zeros(()))
    if singleton == "raw":
        advantages = torch.where(sizes == 1, raw, advantages)
    return advantages


def compute_group_extremes(scores: Tensor, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest and smallest of the `[B]` scores of each group, `[G]` each; NaN in a group that
    contains NaN. `slot` is the row's group, from 0 to `count` - 1."""
    infinite = scores.new_full((count,), torch.inf)
    highest = (-infinite).scatter_reduce(0, slot, scores, "amax")
    lowest = infinite.scatter_reduce(0, slot, scores, "amin")
    return highest, lowest


def has_score_spread(highest: Tensor, lowest: Tensor, tolerance: float = 0.0) -> Tensor:
    """`[...]` bool whether a group's largest and smallest scores differ by more than rounding and
    tolerance; also True where one is NaN, so that NaN is not mistaken for a lack of signal."""
    number = torch.finfo(highest.dtype)
    rounding = torch.maximum(highest.abs(), lowest.abs()) * (ROUNDING * number.eps)
    # Below the smallest normal number, units in the last place are no longer relative.
    same = highest - lowest <= rounding + number.tiny + tolerance
    return ~same


def compute_present_advantages(
    values: Tensor, present: Tensor, group_ids: Tensor, **comparison: Any
) -> Tensor:
    """`[B, K]` group advantages among the present values; 0 where absent."""
    advantages = group_advantages(values[present], group_ids[present], **comparison)
    return torch.zeros_like(values).masked_scatter(present, advantages)


def pair_ids(one: Tensor, other: Tensor) -> Tensor:
    """Ids in the shape of both inputs, equal where both ids are equal."""
    slots: Tensor = one.unique(return_inverse=True)[1]
    names, other_slots = other.unique(return_inverse=True)
    pairs: Tensor = slots * len(names) + other_slots
    return pairs


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
    """`[B, K]` return from each turn on, discounted per turn; the outcome is paid at the last turn.

        Rₖ = Σ_{j≥k} γ^(j-k) · (rⱼ + [j is the last turn taken] · global)

    An unrewarded turn earns 0; `taken` is where the rollout has such a turn.

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


class ScaledAdvantages(NamedTuple):
    """Scaled advantages, `[B]`, and the mean square to pass at the next step; None if unknown."""

    advantages: Tensor
    mean_square: float | None


def estimate_two_level(inputs: CreditInputs, options: TwoLevel) -> Tensor | Credit:
    """Compares answers within their prompt, and confidences within their answer.

        A_ans = λ_ans · norm over G_a         A_conf = λ_conf · second(norm over the G_c siblings)

    With `baseline: prompt`, a row is compared with all rows of its level and its prompt instead.
    With `confidence.baseline: label`, a confidence is compared with all others of the step whose
    answer has the same label: see `compute_label_advantages`.

    Groups come from the batch: rows that continue the same turn, or the prompt, form a group.
    Confidences are the rows of that kind, wherever they stand, and all rows below the answers.

    Returns:
        `[B, T]` advantages, 0 outside the mask; with `ema_scale` also the running mean square.

    Reference:
        RLCR in two turns (RLCR: arXiv 2507.16806). To centre within an answer
        instead of dividing by σ: arXiv 2508.11800.
    """
    scores, within, is_answer = total_scores(inputs), options.confidence, ~_find_confidences(inputs)
    groups = assign_comparison_groups(inputs, ~is_answer, options)
    answers = group_advantages(scores[is_answer], groups[is_answer], **options.comparison)
    if within.baseline == "label":
        labels = inputs.stream("labels").masked_fill(is_answer, torch.nan)
        confidences = compute_label_advantages(
            scores, labels, singleton=within.singleton, tolerance=within.tolerance
        )[~is_answer]
    else:
        confidences = group_advantages(scores[~is_answer], groups[~is_answer], **within.comparison)
    scaled = _apply_second_level(confidences, inputs, options)
    per_row = torch.empty_like(scores)
    per_row[is_answer] = options.lambda_ans * answers
    per_row[~is_answer] = options.lambda_conf * scaled.advantages
    advantages = spread_over_mask(per_row, inputs.mask)
    if scaled.mean_square is None:
        return advantages
    return Credit(advantages=advantages, state={"mean_square": scaled.mean_square})


def _find_confidences(inputs: CreditInputs) -> Tensor:
    """`[B]` bool."""
    return inputs.levels > 0 if inputs.is_confidence is None else inputs.is_confidence


def compute_label_advantages(
    scores: Tensor, labels: Tensor, *, singleton: Singleton = "zero", tolerance: float = 0.0
) -> Tensor:
    """A confidence's score minus the mean of all other confidences of the same label.

        Aᵢ = sᵢ - mean of sⱼ over j ≠ i with yⱼ = yᵢ

    The baseline depends on the label, which is there before the confidence, and not on the
    confidence itself, so the gradient has no bias, even with one confidence per answer. `[B]`;
    labels are NaN where a row is not compared, which gets 0.
    """
    compared, advantages = labels.isfinite(), torch.zeros_like(scores)
    if compared.any():
        advantages[compared] = group_advantages(
            scores[compared],
            labels[compared].unique(return_inverse=True)[1],
            normalize="leave_one_out",
            singleton=singleton,
            tolerance=tolerance,
        )
    return advantages


def _apply_second_level(
    advantages: Tensor, inputs: CreditInputs, options: TwoLevel
) -> ScaledAdvantages:
    prompts = inputs.tree_ids[_find_confidences(inputs)]
    ddof, eps = options.confidence.ddof, options.confidence.eps
    match options.second_level:
        case "none":
            return ScaledAdvantages(advantages, None)
        case "prompt_scale":
            return ScaledAdvantages(prompt_scale(advantages, prompts, ddof=ddof, eps=eps), None)
        case "prompt_renorm":
            return ScaledAdvantages(group_advantages(advantages, prompts, ddof=ddof, eps=eps), None)
        case "ema_scale":
            before = inputs.state.get("mean_square")
            return ema_scale(advantages, before, momentum=options.momentum, eps=eps)


def prompt_scale(
    advantages: Tensor,
    prompt_ids: Tensor,
    *,
    ddof: int = _TWO_LEVEL.confidence.ddof,
    eps: float = _TWO_LEVEL.confidence.eps,
) -> Tensor:
    """Divides all confidences of a prompt, `[B]` and centred within their answer, by one deviation,
    without shifting the mean. 0 stays exactly 0.

        Aᵢ = aᵢ / (σ + ε)        σ² = Σ a² / (n - ddof) over the prompt

    Right and wrong answers of a prompt share σ, so it cancels less than dividing within an answer
    does; if all answers of a prompt are alike it cancels just as much.

    Reference:
        RLCR in two turns (RLCR: arXiv 2507.16806).
    """
    _, slot, counts = prompt_ids.unique(return_inverse=True, return_counts=True)
    squares = advantages.new_zeros(len(counts)).index_add(0, slot, advantages.square())
    deviation = (squares / (counts - ddof).clamp(min=1)).sqrt()
    return _divide_by_scale(advantages, deviation[slot] + eps)


def ema_scale(
    advantages: Tensor,
    mean_square: float | None,
    *,
    momentum: float = _TWO_LEVEL.momentum,
    eps: float = _TWO_LEVEL.confidence.eps,
) -> ScaledAdvantages:
    """Divides `[B]` confidences, centred within their answer, by a running root mean square, shared
    by all prompts and carried across steps. 0 stays exactly 0.

        v ← m · v + (1 - m) · mean(a²)        Aᵢ = aᵢ / (√v + ε)

    The scale does not depend on the answer or the prompt, so the Brier gradient keeps its size. A
    step without any signal leaves v (`mean_square`) unchanged: it has no scale, and a v that starts
    at 0 would blow up the next step.

    Reference:
        RLCR in two turns (RLCR: arXiv 2507.16806).
    """
    if not bool((advantages != 0).any()):
        return ScaledAdvantages(advantages, mean_square)
    now = float(advantages.square().mean())
    new = now if mean_square is None else momentum * mean_square + (1 - momentum) * now
    scale = advantages.new_tensor(math.sqrt(new) + eps)
    return ScaledAdvantages(_divide_by_scale(advantages, scale), new)


def _divide_by_scale(advantages: Tensor, scale: Tensor) -> Tensor:
    """Divides; a scale of 0 occurs only with advantages of 0, which stay 0."""
    return torch.where(advantages == 0, 0.0, advantages / scale)
