"""Flash attention as torch has it on each device, with the log-sum-exp that results are merged by.

Attention to some of a query's keys and attention to the others make up attention to all, where the
log-sum-exp of the scores is known of both. In return, `differentiate` takes the output and the
log-sum-exp of all keys, and gives the gradients that its own keys account for: torch's ring
attention is computed so.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import repeat_kv

__all__ = ["attend", "differentiate"]

HALF = (torch.bfloat16, torch.float16)
"""What flash attention on a GPU takes; its memory-efficient attention also takes float32."""
ALIGNED = 32
"""Memory-efficient attention pads a log-sum-exp to a multiple of this many queries."""

_aten = torch.ops.aten


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Computes attention.

    Args:
        query: `[n, heads, b, width]`.
        key, value: `[n, kv_heads, k, width]`.
        causal: query i attends to the keys up to i, with b = k; otherwise it attends to all.
        scale: factor of the scores; None for 1/√width.

    Returns:
        Outputs like the queries, and `[n, heads, b]` log-sum-exp of the scores, at least float32.
    """
    kernel = _select_kernel(query)
    if kernel == "efficient":
        fewer = query.shape[1] // key.shape[1]
        output, logsumexp, *_ = _aten._scaled_dot_product_efficient_attention(
            *(query, repeat_kv(key, fewer), repeat_kv(value, fewer)),
            *(None, True, 0.0, causal),
            scale=scale,
        )
        return output, logsumexp[..., : query.shape[2]]
    on_cpu = kernel == "cpu"
    flash = _aten._scaled_dot_product_flash_attention
    flash = _aten._scaled_dot_product_flash_attention_for_cpu if on_cpu else flash
    output, logsumexp, *_ = flash(query, key, value, 0.0, causal, scale=scale)
    return output, logsumexp


def differentiate(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key and value.

    Args:
        gradient: of the output.
        query, key, value, causal, scale: as for `attend`.
        output, logsumexp: of these keys and all others that the queries attend to.
    """
    kernel = _select_kernel(query)
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            gradient, query, key, value, output, logsumexp, 0.0, causal, scale=scale
        )
    undrawn = torch.zeros(2, dtype=torch.uint64, device=query.device)  # nothing is dropped out
    if kernel == "flash":
        return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            *(gradient, query, key, value, output, logsumexp.contiguous()),
            *(None, None, query.shape[2], key.shape[2], 0.0, causal, undrawn, undrawn),
            scale=scale,
        )
    heads = key.shape[1]
    fewer = query.shape[1] // heads
    padded = pad(logsumexp, (0, -query.shape[2] % ALIGNED), value=torch.inf).contiguous()
    queries, keys, values, _ = _aten._scaled_dot_product_efficient_attention_backward(
        *(gradient, query, repeat_kv(key, fewer), repeat_kv(value, fewer), None),
        *(output, padded, undrawn, undrawn, 0.0, [True, True, True, False], causal),
        scale=scale,
    )
    keys, values = (states.unflatten(1, (heads, fewer)).sum(dim=2) for states in (keys, values))
    return queries, keys, values


def _select_kernel(query: Tensor) -> str:
    """The kernel for the device and dtype of the queries."""
    if query.is_cpu:
        return "cpu"
    return "flash" if query.dtype in HALF else "efficient"
