"""Mask strategies: which tokens of a batch learn."""

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.spec import Effective, ModelTokens, TurnSpans


def select_response_tokens(batch: TokenBatch) -> Tensor:
    """`[B, T]` everything from the row's first own token on: KG-R1's attention mask.

    Text of an environment learns too, which needs `loss.old_logprobs: learner`.

    Reference:
        KG-R1, arXiv 2509.26383: `response_mask`.
    """
    return batch.is_response


def select_model_tokens(batch: TokenBatch, options: ModelTokens) -> Tensor:
    """`[B, T]` what the policy wrote as part of this row: KG-R1's loss mask.

    Without the rows in which a turn ran out of tokens, if these are skipped (DAPO, section 3.4).
    """
    mask = batch.is_own.clone()
    return mask if options.truncated == "learn" else mask & ~_find_truncated_rows(batch)


def select_effective_tokens(batch: TokenBatch, options: Effective) -> Tensor:
    """`[B, T]` KG-R1's rule, one mask for KL, GAE, GRPO and score.

        multi-turn and state_masking:  model tokens
        otherwise:                     the whole response

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    is_multi_turn = bool(batch.is_environment.any())
    return batch.is_own.clone() if is_multi_turn and options.state_masking else batch.is_response


def select_span_tokens(batch: TokenBatch, options: TurnSpans) -> Tensor:
    """`[B, T]` a row's own tokens inside any of its spans, tags included.

    The spans are those declared in YAML for each kind of turn. Every turn of a row is taken by
    itself: one without any of its spans falls back, whatever the others have.

    Reference:
        RLCR in two turns (RLCR: arXiv 2507.16806): M_ans is think + answer, M_conf is analysis +
        confidence. Taken literally it is `hull=True, fallback="none", include_eos=False`.
    """
    mask = torch.zeros_like(batch.is_own)
    for span in (batch.is_hull,) if options.hull else batch.spans.values():
        mask |= span
    found = _extend_to_turns(mask, batch.turn_ids)
    if options.include_eos:
        mask |= batch.is_end & found
    if options.fallback == "response":
        mask |= batch.is_own & ~found
    mask &= batch.is_own
    return mask if options.truncated == "learn" else mask & ~_find_truncated_rows(batch)


def _extend_to_turns(mask: Tensor, turn_ids: Tensor) -> Tensor:
    """`[B, T]` bool all tokens of the turns that have a token in the mask."""
    turns = turn_ids.clamp(min=0)  # column 0: tokens of no turn, none of which is in the mask
    counts = torch.zeros(len(mask), int(turns.max()) + 1, dtype=torch.int64)
    return counts.scatter_add(1, turns, mask.long()).gather(1, turns) > 0


def _find_truncated_rows(batch: TokenBatch) -> Tensor:
    """`[B, 1]` bool rows in which some turn ran out of tokens."""
    after = torch.nn.functional.pad(batch.turn_ids[:, 1:], (0, 1), value=0)
    cut_off = batch.is_own & (after != batch.turn_ids) & ~batch.is_end
    return cut_off.any(dim=1, keepdim=True)
