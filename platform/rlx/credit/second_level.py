"""The second level of two-level credit: rescales the advantages within answers.

Two-level credit belongs to RLCR in two turns (RLCR: arXiv 2507.16806). The first level compares a
confidence with its siblings and leaves the scale open. These functions choose the scale; they take
only the advantages of confidences, not those of answers. Normalising again per prompt
(`prompt_renorm`) is `group_advantages` on the prompt ids; on centred advantages, whose mean is 0,
it equals `prompt_scale`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ScaledAdvantages", "ema_scale", "prompt_scale"]


class ScaledAdvantages(NamedTuple):
    """Scaled advantages, `[B]`, and the mean square to pass at the next step; None if unknown."""

    advantages: Tensor
    mean_square: float | None


def prompt_scale(
    advantages: Tensor, prompt_ids: Tensor, *, ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """Divides all confidences of a prompt by one deviation, without shifting the mean.

        Aᵢ = aᵢ / (σ + ε)        σ² = Σ a² / (n - ddof) over the prompt

    Right and wrong answers of a prompt share σ, so it cancels less than dividing within an
    answer does; if all answers of a prompt are alike it cancels just as much.

    Args:
        advantages: `[B]` confidences, centred within their answer.
        prompt_ids: `[B]` rows with equal ids belong to one prompt.
        ddof: as above.
        eps: added to σ.

    Returns:
        `[B]`; 0 stays exactly 0.

    Reference:
        RLCR in two turns (RLCR: arXiv 2507.16806).
    """
    _, slot, counts = prompt_ids.unique(return_inverse=True, return_counts=True)
    squares = advantages.new_zeros(len(counts)).index_add(0, slot, advantages.square())
    deviation = (squares / (counts - ddof).clamp(min=1)).sqrt()
    return _divide_by_scale(advantages, deviation[slot] + eps)


def ema_scale(
    advantages: Tensor, mean_square: float | None, *, momentum: float = 0.9, eps: float = 1e-6
) -> ScaledAdvantages:
    """Divides by a running root mean square, shared by all prompts and carried across steps.

        v ← m · v + (1 - m) · mean(a²)        Aᵢ = aᵢ / (√v + ε)

    The scale does not depend on the answer or the prompt, so the Brier gradient keeps its size.

    Args:
        advantages: `[B]` confidences of the whole step, centred within their answer.
        mean_square: v after the previous step; None before the first.
        momentum: m.
        eps: added to √v.

    Returns:
        `[B]` advantages, 0 stays exactly 0; and the new v. A step without any signal leaves v
        unchanged: it has no scale, and a v that starts at 0 would blow up the next step.

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
