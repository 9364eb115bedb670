"""Credit assignment: rewards in, token advantages out. Tensors alone; nothing here knows of
models, engines, schedules or specs beyond an estimator's own options.

An estimator takes `CreditInputs` and its options and returns `[B, T]`. It is named in YAML, found
through the entry-point group `rlx.estimators`, and imported only by a run.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlx.credit.group import group_advantages
from rlx.errors import ShapeError
from rlx.spec.estimator import Confidence

__all__ = ["CreditInputs", "group_advantages", "grpo", "on_mask", "total_scores", "two_level"]

Normalize = Literal["std", "center"]
Singleton = Literal["zero", "raw"]


@dataclass(frozen=True, eq=False, kw_only=True)
class CreditInputs:
    """All that an estimator may look at.

    Attributes:
        turn_rewards: `[B, K]` weighted sum of a turn's named rewards, turn number k at k - 1; 0
            where not `turn_present`.
        turn_present: `[B, K]` bool the turn was rewarded. Absent is not zero.
        global_rewards: `[B]` weighted sum of the rewards of the whole rollout; 0 where none.
        turn_ids: `[B, T]` int64 turn number of the row's own tokens, from 1; -1 elsewhere.
        mask: `[B, T]` bool tokens that learn.
        group_ids: `[B]` int64 rows with equal ids may be compared.
        levels: `[B]` int64 0 for rows that continue a prompt, 1 for rows that continue those, ...
        tree_ids: `[B]` int64 rows with equal ids were grown from one prompt.
    """

    turn_rewards: Tensor
    turn_present: Tensor
    global_rewards: Tensor
    turn_ids: Tensor
    mask: Tensor
    group_ids: Tensor
    levels: Tensor
    tree_ids: Tensor

    def __post_init__(self) -> None:
        rows = len(self.global_rewards)
        for name, value in vars(self).items():
            if len(value) != rows:
                raise ShapeError(f"{name} has {len(value)} rows, not {rows}")
        for one, other in (("turn_present", "turn_rewards"), ("turn_ids", "mask")):
            shapes = tuple(getattr(self, one).shape), tuple(getattr(self, other).shape)
            if shapes[0] != shapes[1]:
                raise ShapeError(f"{one} is {shapes[0]}, {other} is {shapes[1]}")


def total_scores(inputs: CreditInputs) -> Tensor:
    """`[B]` mean of the rewarded turns plus the global rewards; no turns: the global ones alone.

    total = meanₖ(turn rewardₖ) + Σ global                       design 000, section 1.2
    """
    turns = inputs.turn_present.sum(dim=1)
    rewards = torch.where(inputs.turn_present, inputs.turn_rewards, 0.0).sum(dim=1)
    return rewards / turns.clamp(min=1) + inputs.global_rewards


def grpo(
    inputs: CreditInputs,
    *,
    normalize: Normalize = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Tensor:
    """Outcome GRPO: the row's normalised total score on each of its learning tokens, `[B, T]`."""
    per_row = group_advantages(
        total_scores(inputs),
        inputs.group_ids,
        normalize=normalize,
        ddof=ddof,
        eps=eps,
        singleton=singleton,
    )
    return on_mask(per_row, inputs.mask)


def two_level(
    inputs: CreditInputs,
    *,
    normalize: Normalize = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    confidence: Confidence | None = None,
    lambda_ans: float = 1.0,
    lambda_conf: float = 1.0,
) -> Tensor:
    """Answers against the answers of their prompt, confidences against those of their answer.

        A_ans = λ_ans · norm over G_a         A_conf = λ_conf · norm over the G_c siblings

    Groups are the batch's own: an answer's group is its prompt's answers, a confidence's group the
    confidences of the same answer. Level 0 rows are answers, deeper rows confidences.

    Returns:
        `[B, T]` advantages, 0 outside the mask.

    Reference:
        Design 004. Centring within an answer instead of dividing by σ: arXiv 2508.11800.
    """
    how = confidence or Confidence()
    scores, groups = total_scores(inputs), inputs.group_ids
    answers = group_advantages(
        scores, groups, normalize=normalize, ddof=ddof, eps=eps, singleton=singleton
    )
    confidences = group_advantages(
        scores,
        groups,
        normalize=how.normalize,
        ddof=how.ddof,
        eps=how.eps,
        singleton=how.singleton,
    )
    is_answer = inputs.levels == 0
    return on_mask(
        torch.where(is_answer, lambda_ans * answers, lambda_conf * confidences), inputs.mask
    )


def on_mask(per_row: Tensor, mask: Tensor) -> Tensor:
    """`[B]` to `[B, T]`, selected and not multiplied, so that NaN cannot leak past the mask."""
    return torch.where(mask, per_row[:, None], per_row.new_zeros(()))
