"""Log-probabilities and entropies from hidden states, without ever holding all logits.

Logits of T tokens over a vocabulary of V need T · V numbers, several times over: 5 GB each in
float32 for 8192 tokens of a Qwen2.5 model. Here they are computed for one chunk of the vocabulary
at a time, once in the forward pass, with a running maximum and sum (Milakov & Gimelshein 2018,
arXiv 1805.02867, Algorithm 3), and once more in the backward pass. It costs one more product with
the output matrix, and equals the plain computation up to rounding.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlx.repeatable import sum_by_slot

__all__ = ["CHUNK", "compute_token_logprobs"]

CHUNK = 8192
"""Tokens of the vocabulary per chunk."""


def compute_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    states: Tensor,
    tokens: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Computes log p(tokens[k] | states[k]) and the entropy H of every state, with

        z = (hidden · weightᵀ + bias) / temperature,    log p = z - logsumexp z,    H = -Σ p log p.

    Args:
        hidden: `[N, D]` last hidden states.
        weight: `[V, D]` of the output layer.
        bias: `[V]`, or None.
        temperatures: `[N]`.
        states: `[K]` indices of hidden states; one may be repeated.
        tokens: `[K]` token ids.
        chunk: tokens of the vocabulary that are computed together.

    Returns:
        `[K]` and `[N]` float32, nats. Gradients flow to `hidden`, `weight` and `bias`.
    """
    made: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, temperatures, states, tokens, chunk
    )
    return made


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor,
        states: Tensor,
        tokens: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        highest = torch.full((count,), -torch.inf, device=hidden.device)
        total = torch.zeros(count, device=hidden.device)  # Σ exp(z - highest)
        spread = torch.zeros_like(total)  # Σ exp(z - highest) · (z - highest)
        chosen = torch.zeros(len(tokens), device=hidden.device)
        for start, z in _iterate_logits(hidden, weight, bias, temperatures, chunk):
            top = torch.maximum(highest, z.amax(dim=1))
            fall = (highest - top).nan_to_num(nan=0.0, neginf=0.0)  # total is 0 where it was -inf
            shrink = fall.exp()
            spread = shrink * (spread + fall * total)
            is_here, column = _locate_tokens(tokens, start, z)
            chosen = torch.where(is_here, z[states, column], chosen)
            z -= top[:, None]
            weighted = z.exp()
            total = shrink * total + weighted.sum(dim=1)
            spread += weighted.mul_(z).sum(dim=1)
            highest = top
        log_total = total.log()
        logsumexp, entropy = highest + log_total, log_total - spread / total
        ctx.save_for_backward(
            hidden, weight, bias, temperatures, states, tokens, logsumexp, entropy
        )
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)  # the entropy rarely has a gradient
        return chosen - logsumexp[states], entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """∂ log p(t) / ∂z = 1[t] - p and ∂H / ∂z = -p · (log p + H), by chunks."""
        hidden, weight, bias, temperatures, states, tokens, logsumexp, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        if of_logprobs is None:
            of_logprobs = torch.zeros(len(tokens), device=hidden.device)
        each = sum_by_slot(of_logprobs, states, len(logsumexp))
        d_hidden = torch.zeros(hidden.shape, device=hidden.device) if to_hidden else None
        d_weight = torch.empty_like(weight) if to_weight else None
        d_bias = torch.empty_like(bias) if to_bias else None
        for start, z in _iterate_logits(hidden, weight, bias, temperatures, ctx.chunk):
            part = slice(start, start + z.shape[1])
            is_here, column = _locate_tokens(tokens, start, z)
            z -= logsumexp[:, None]
            if of_entropy is None:
                gradient = z.exp_().mul_(-each[:, None])
            else:
                p = z.exp()
                # -p · (each + of_entropy · (log p + H))
                z.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(each[:, None])
                gradient = p.mul_(z).neg_()
            gradient.index_put_((states, column), of_logprobs * is_here, accumulate=True)
            gradient = gradient.div_(temperatures[:, None]).to(weight.dtype)
            if d_hidden is not None:
                d_hidden += gradient @ weight[part]
            if d_weight is not None:
                d_weight[part] = gradient.t() @ hidden
            if d_bias is not None:
                d_bias[part] = gradient.sum(dim=0)
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _iterate_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor, chunk: int
) -> Iterator[tuple[int, Tensor]]:
    """Yields the first token of every chunk, and its `[N, chunk]` float32 logits, to be changed."""
    for start in range(0, len(weight), chunk):
        part = slice(start, start + chunk)
        logits = functional.linear(hidden, weight[part], None if bias is None else bias[part])
        yield start, logits / temperatures[:, None]  # float32, as the temperatures are


def _locate_tokens(tokens: Tensor, start: int, z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which tokens are in a chunk, and a valid column of it for each."""
    column = tokens - start
    return (column >= 0) & (column < z.shape[1]), column.clamp(0, z.shape[1] - 1)
