"""Which decoder computes a model: the fastest whose logits are those of the model itself."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlx.errors import SpecError, summarize_error
from rlx.model import do_windows_show, find_window, narrow_windows
from rlx.sampler.gpu_steps import WARM_UP
from rlx.sampler.own_forward import CachedDecoder, UncachedDecoder
from rlx.sampler.plain_decoder import PlainDecoder, unknown_part
from rlx.sampler.rows import Decoder, SharingDecoder

NARROW = 5
"""Maximum width of an attention window in the trial, in tokens: shorter than its contexts."""

NEAR = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Maximum relative difference of logits (L2 norms), by dtype."""

PLAIN = "the plain decoder"
CAPTURED = frozenset({"cuda"})
"""Devices on which steps are captured, because launching kernels takes time."""

ROUGHLY = 0.1
"""Maximum relative difference for all other dtypes; rounding errors are well below it."""


def choose_decoder(model: PreTrainedModel) -> Callable[[], Decoder]:
    """Chooses a decoder for a model by comparing logits; the choice stays valid when the weights
    change.

    Returns:
        A function that builds the decoder for the model's current weights.

    Raises:
        SpecError: the model cannot be sampled from.
    """
    window = find_window(model.config)
    why = unknown_part(model) or (window and f"an attention window of {window}")
    if not why:

        def build(**options: Any) -> SharingDecoder:
            return SharingDecoder(PlainDecoder(model), **options)

        why = _find_decoder_fault(model, PLAIN, build)
        if why is None and model.device.type not in CAPTURED:
            return build
        if why is None:
            fault = _find_decoder_fault(model, PLAIN, partial(build, captures=True))
            return partial(build, captures=True, why_not=fault)
    cached = CachedDecoder(model, f"it has {why}")
    if window is not None and not do_windows_show(model, NARROW):
        return _choose_uncached(model, "its attention windows cannot be tried")
    with narrow_windows(model, NARROW) if window is not None else nullcontext():
        fault = _find_decoder_fault(model, "its own forward pass with a cache", lambda: cached)
        if fault is None:
            return lambda: cached
        with torch.inference_mode():
            if not _compute_model_logits(model, [0, 1, 2], [3]).isfinite().all():
                return lambda: cached  # sampling reports it
        return _choose_uncached(model, f"without a cache, for it has {fault}")


def _choose_uncached(model: PreTrainedModel, why: str) -> Callable[[], Decoder]:
    """The decoder that fits every causal model.

    Raises:
        SpecError: it does not fit this one.
    """
    uncached = UncachedDecoder(model, why)
    if fault := _find_decoder_fault(model, "its own forward pass", lambda: uncached):
        raise SpecError(
            f"model: a model of kind {model.config.model_type!r} cannot be sampled from: it has "
            f"{fault}; use a causal language model"
        )
    return lambda: uncached


def _find_decoder_fault(
    model: PreTrainedModel, name: str, build: Callable[[], Decoder]
) -> str | None:
    """Explains why a decoder cannot be used; None if it can."""
    try:
        difference = _compute_logit_difference(model, build())
    except Exception as error:  # noqa: BLE001  (an unusual model may fail in any way)
        return f"parts that {name} does not support ({summarize_error(error)[:200]})"
    if difference < NEAR.get(model.dtype, ROUGHLY):
        return None
    return f"logits that differ from those of {name} by {difference:.1g}"


@torch.inference_mode()
def _compute_logit_difference(model: PreTrainedModel, decoder: Decoder) -> float:
    """Returns the relative difference between the logits of forked dialogues and those of the
    model's own forward pass."""
    generator = torch.Generator().manual_seed(0)
    count = model.get_input_embeddings().num_embeddings
    drawn = torch.randint(count, (2 + WARM_UP + 2, 16), generator=generator)
    contexts = [drawn[0].tolist(), drawn[1, :7].tolist()]
    copies, steps = [0, 1, 0], drawn[2:, :3].to(model.device)
    rows = decoder.start(len(contexts))
    logits = [rows.prefill(contexts, 0)[copies]]
    forked = rows.fork(copies, len(steps))
    logits += [forked.step(tokens).clone() for tokens in steps]
    ours = torch.stack(logits, dim=1).float()
    theirs = torch.stack(
        [
            _compute_model_logits(model, contexts[copy], tokens.tolist())
            for copy, tokens in zip(copies, steps.T, strict=True)
        ]
    ).float()
    return float((ours - theirs).norm() / theirs.norm())


def _compute_model_logits(model: PreTrainedModel, context: list[int], tokens: list[int]) -> Tensor:
    """Returns the logits after the context and after each of the tokens, `[1 + tokens, V]`."""
    ids = torch.tensor([context + tokens], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 :]
    return logits
