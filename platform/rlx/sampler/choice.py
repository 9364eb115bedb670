"""Which way a model is computed: the fast one where it gives the model's own numbers."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlx.sampler.cache import TransformersDecoder
from rlx.sampler.captured import WARM_UP
from rlx.sampler.plain_decoder import PlainDecoder, unknown_part
from rlx.sampler.rows import Decoder
from rlx.sampler.shared_rows import SharingDecoder

__all__ = ["choose_decoder"]

NEAR = {torch.float32: 1e-4, torch.float64: 1e-4}
CAPTURED = frozenset({"cuda"})
"""Devices on which steps are captured: where launching kernels takes time."""
ROUGHLY = 0.1
"""Difference of logits over their size, root mean squares: rounding stays well below, in float32
and in shorter numbers."""


def choose_decoder(model: PreTrainedModel) -> Callable[[], Decoder]:
    """How a model is computed from now on, whatever its weights become.

    Returns:
        Makes the decoder of the model's present weights.
    """
    why = unknown_part(model)
    if why is None and (why := _find_decoder_fault(model, captures=False)) is None:
        captures = model.device.type in CAPTURED
        not_captured = _find_decoder_fault(model, captures=True) if captures else None
        return lambda: SharingDecoder(PlainDecoder(model), captures, not_captured)
    return lambda: TransformersDecoder(model, f"it has {why}")


def _find_decoder_fault(model: PreTrainedModel, *, captures: bool) -> str | None:
    """What a plain decoder would get wrong."""
    try:
        difference = _compute_logit_difference(model, captures=captures)
    except Exception as error:  # noqa: BLE001  (a model may be unlike its kind in any way)
        return f"parts that no plain decoder reads ({error})"
    if difference < NEAR.get(model.dtype, ROUGHLY):
        return None
    return f"logits of a plain decoder, which are {difference:.1g} away"


@torch.inference_mode()
def _compute_logit_difference(model: PreTrainedModel, *, captures: bool) -> float:
    """How far the logits of forked dialogues are from those of the model's own forward."""
    generator = torch.Generator().manual_seed(0)
    count = model.get_input_embeddings().num_embeddings
    drawn = torch.randint(count, (2 + WARM_UP + 2, 16), generator=generator)
    contexts = [drawn[0].tolist(), drawn[1, :7].tolist()]
    copies, steps = [0, 1, 0], drawn[2:, :3].to(model.device)
    rows = SharingDecoder(PlainDecoder(model), captures=captures).start(len(contexts))
    logits = [rows.read(contexts, 0)[copies]]
    forked = rows.fork(copies, len(steps))
    logits += [forked.step(tokens).clone() for tokens in steps]
    ours = torch.stack(logits, dim=1).float()
    theirs = torch.stack(
        [
            _compute_model_logits(model, contexts[copy], said.tolist())
            for copy, said in zip(copies, steps.T, strict=True)
        ]
    ).float()
    return float((ours - theirs).norm() / theirs.norm())


def _compute_model_logits(model: PreTrainedModel, context: list[int], said: list[int]) -> Tensor:
    """Logits behind a context, and behind each token said, `[1 + said, V]`."""
    ids = torch.tensor([context + said], device=model.device)
    logits: Tensor = model(input_ids=ids).logits[0, len(context) - 1 :]
    return logits
