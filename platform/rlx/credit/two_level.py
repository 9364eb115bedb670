"""Two-level credit, which belongs to RLCR in two turns (RLCR: arXiv 2507.16806).

Confidences are compared twice: first with their siblings, which leaves the scale open; then the
scale is chosen, over a wider group. On centred advantages `prompt_renorm` equals `prompt_scale`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.credit.grpo import assign_comparison_groups, group_advantages
from rlx.credit.inputs import Credit, CreditInputs, spread_over_mask, total_scores
from rlx.spec import Singleton, TwoLevel

_DEFAULTS = TwoLevel()


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
    groups = assign_comparison_groups(
        inputs.group_ids, inputs.tree_ids, inputs.levels, ~is_answer, options
    )
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
    ddof: int = _DEFAULTS.confidence.ddof,
    eps: float = _DEFAULTS.confidence.eps,
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
    momentum: float = _DEFAULTS.momentum,
    eps: float = _DEFAULTS.confidence.eps,
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
