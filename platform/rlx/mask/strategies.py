"""Mask strategies: which tokens of a batch learn."""

from typing import Literal

import torch
from torch import Tensor

from rlx.batch import TokenBatch

__all__ = [
    "select_effective_tokens",
    "select_model_tokens",
    "select_response_tokens",
    "select_span_tokens",
]

Truncated = Literal["learn", "skip"]


def select_response_tokens(batch: TokenBatch) -> Tensor:
    """`[B, T]` everything from the row's first own token on: KG-R1's attention mask.

    Text of an environment learns too, which needs `loss.old_logprobs: learner`.

    Reference:
        KG-R1, arXiv 2509.26383: `response_mask`.
    """
    return batch.is_response


def select_model_tokens(batch: TokenBatch, *, truncated: Truncated = "learn") -> Tensor:
    """`[B, T]` what the policy wrote as part of this row: KG-R1's loss mask.

    Args:
        batch: the rows.
        truncated: "skip" leaves out rows in which a turn ran out of tokens (DAPO, section 3.4).
    """
    return _drop_truncated_rows(batch.is_own.clone(), batch, truncated)


def select_effective_tokens(batch: TokenBatch, *, state_masking: bool = True) -> Tensor:
    """`[B, T]` KG-R1's rule, one mask for KL, GAE, GRPO and score.

        multi-turn and state_masking:  model tokens
        otherwise:                     the whole response

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    is_multi_turn = bool(batch.is_environment.any())
    return (
        select_model_tokens(batch)
        if is_multi_turn and state_masking
        else select_response_tokens(batch)
    )


def select_span_tokens(
    batch: TokenBatch,
    *,
    fallback: Literal["response", "none"] = "response",
    include_eos: bool = True,
    hull: bool = False,
    truncated: Truncated = "learn",
) -> Tensor:
    """A row's own tokens inside any of its spans, tags included.

    Args:
        batch: the rows; spans are those declared in YAML for each kind of turn.
        fallback: for a row without any of its spans. "response": all of its own
            tokens learn, including its end, so that format failures are corrected. "none": none
            does.
        include_eos: whether the token that ends a turn learns too.
        hull: each turn learns from the start of its first declared span to the end of its last
            one, words between them included, or to its end if the last one is not closed.
        truncated: "skip" leaves out rows in which a turn ran out of tokens.

    Returns:
        `[B, T]` bool.

    Reference:
        RLCR in two turns (RLCR: arXiv 2507.16806): M_ans is think + answer, M_conf is analysis +
        confidence. Taken literally it is `hull=True, fallback="none", include_eos=False`.
    """
    mask = torch.zeros_like(batch.is_own)
    for span in (batch.is_hull,) if hull else batch.spans.values():
        mask |= span
    found = mask.any(dim=1, keepdim=True)
    if include_eos:
        mask |= batch.is_end & found
    if fallback == "response":
        mask |= batch.is_own & ~found
    return _drop_truncated_rows(mask & batch.is_own, batch, truncated)


def _drop_truncated_rows(mask: Tensor, batch: TokenBatch, truncated: Truncated) -> Tensor:
    """Drops the rows in which some turn was truncated, if `truncated` is "skip"."""
    if truncated == "learn":
        return mask
    after = torch.nn.functional.pad(batch.turn_ids[:, 1:], (0, 1), value=0)
    cut_off = batch.is_own & (after != batch.turn_ids) & ~batch.is_end
    return mask & ~cut_off.any(dim=1, keepdim=True)
