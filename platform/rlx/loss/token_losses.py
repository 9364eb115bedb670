"""The token losses that a `loss:` section asks for."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlx.loss.surrogates import (
    LARGEST_LOG_RATIO,
    clip_log_ratio,
    clipped_surrogate,
    compute_cispo_loss,
    compute_dppo_loss,
    compute_sapo_loss,
    compute_unclipped_loss,
    find_close_sequences,
    find_near_tokens,
    sequence_log_ratio,
)
from rlx.spec import Divergence, KlCovariance, LossSpec

_DIVERGENCES: dict[str, Divergence] = {"dppo_tv": "tv", "dppo_kl": "kl"}


class TokenLosses(NamedTuple):
    """Token losses before any penalty, `[M]`; the log-ratios in them; where they are held back."""

    losses: Tensor
    log_ratio: Tensor
    held: Tensor


def compute_token_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    rows: Tensor,
    spec: LossSpec,
    covariant: Tensor | None = None,
) -> TokenLosses:
    """The surrogate of each token, with the ratio, masks and covariance rule of `spec`.

    Args:
        logprobs: `[M]` nats under the policy being trained.
        old_logprobs: `[M]` nats, the denominator of the ratio.
        advantages: `[M]`.
        rows: `[M]` int64 row of each token; with ratios or masks of sequences, all learning tokens
            of every row are present.
        spec: the loss.
        covariant: `[M]` bool tokens that `loss.covariance` has chosen; None if off.
    """
    token_log_ratio = logprobs - old_logprobs
    log_ratio = _compute_log_ratio(token_log_ratio, advantages, rows, spec)
    losses = _compute_surrogate_loss(log_ratio, logprobs, old_logprobs, advantages, spec)
    held = _find_held_tokens(token_log_ratio, log_ratio, logprobs, old_logprobs, advantages, spec)
    if spec.sequence_mask is not None:
        close = find_close_sequences(token_log_ratio, advantages, rows, bound=spec.sequence_mask)
        losses, held = torch.where(close, losses, 0.0), held | ~close
    if covariant is None:
        return TokenLosses(losses, log_ratio, held)
    if isinstance(spec.covariance, KlCovariance):
        penalty = spec.covariance.coefficient * token_log_ratio.abs()
        return TokenLosses(losses + torch.where(covariant, penalty, 0.0), log_ratio, held)
    return TokenLosses(torch.where(covariant, 0.0, losses), log_ratio, held | covariant)


def _compute_log_ratio(
    token_log_ratio: Tensor, advantages: Tensor, rows: Tensor, spec: LossSpec
) -> Tensor:
    """Returns `[M]` log-ratios of tokens or rows."""
    if spec.surrogate == "log_clip":
        token_log_ratio = clip_log_ratio(token_log_ratio, advantages, clip=spec.clip)
    match spec.ratio:
        case "token":
            return token_log_ratio
        case "sequence":
            return sequence_log_ratio(token_log_ratio, rows)
        case "sequence_token":
            whole = sequence_log_ratio(token_log_ratio.detach(), rows)
            return whole + token_log_ratio - token_log_ratio.detach()


def _compute_surrogate_loss(
    log_ratio: Tensor, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, spec: LossSpec
) -> Tensor:
    """Returns `[M]` token losses."""
    match spec.surrogate:
        case "clip":
            return clipped_surrogate(
                log_ratio, advantages, clip=spec.clip, dual_clip=spec.dual_clip
            )
        case "cispo":
            return compute_cispo_loss(log_ratio, advantages, logprobs, clip=spec.clip)
        case "sapo":
            return compute_sapo_loss(log_ratio, advantages, temperatures=spec.temperatures)
        case "dppo_tv" | "dppo_kl":
            return compute_dppo_loss(
                logprobs,
                old_logprobs,
                advantages,
                divergence=_DIVERGENCES[spec.surrogate],
                bounds=spec.clip,
                cap=spec.ratio_cap,
            )
        case "log_clip" | "none":
            return compute_unclipped_loss(log_ratio, advantages)


@torch.no_grad()
def _find_held_tokens(
    token_log_ratio: Tensor,
    log_ratio: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    spec: LossSpec,
) -> Tensor:
    """Returns `[M]` bool: where the surrogate bounds the ratio, or leaves the token out."""
    low, high = spec.clip
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    above, below = ratio > 1 + high, ratio < 1 - low
    match spec.surrogate:
        case "clip":
            held = (above & (advantages > 0)) | (below & (advantages < 0))
            if spec.dual_clip is not None:
                held |= (ratio > spec.dual_clip) & (advantages < 0)
            return held
        case "cispo":
            return (above | below) & (advantages != 0)
        case "dppo_tv" | "dppo_kl":
            return ~find_near_tokens(
                logprobs,
                old_logprobs,
                advantages,
                divergence=_DIVERGENCES[spec.surrogate],
                bounds=spec.clip,
            )
        case "log_clip":
            bounded = clip_log_ratio(token_log_ratio, advantages, clip=spec.clip)
            return (bounded != token_log_ratio) & (advantages != 0)
        case "sapo" | "none":
            return torch.zeros_like(above)
