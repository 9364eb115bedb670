"""Chooses a model's decoder: the fast one if it reproduces the model's own logits."""

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
"""Maximum relative difference of logits (L2 norms), by dtype."""
CAPTURED = frozenset({"cuda"})
"""Devices on which steps are captured, because launching kernels takes time."""
ROUGHLY = 0.1
"""Maximum relative difference for all other dtypes; rounding errors are well below it."""


def choose_decoder(model: PreTrainedModel) -> Callable[[], Decoder]:
    """Chooses a decoder for a model; the choice stays valid when the weights change.

    Returns:
        A function that builds the decoder for the model's current weights.
    """
    why = unknown_part(model)
    if why is None and (why := _find_decoder_fault(model, captures=False)) is None:
        captures = model.device.type in CAPTURED
        not_captured = _find_decoder_fault(model, captures=True) if captures else None
        return lambda: SharingDecoder(PlainDecoder(model), captures, not_captured)
    return lambda: TransformersDecoder(model, f"it has {why}")


def _find_decoder_fault(model: PreTrainedModel, *, captures: bool) -> str | None:
    """Explains why the plain decoder cannot be used; None if it can."""
    try:
        difference = _compute_logit_difference(model, captures=captures)
    except Exception as error:  # noqa: BLE001  (an unusual model may fail in any way)
        return f"parts that the plain decoder does not support ({error})"
    if difference < NEAR.get(model.dtype, ROUGHLY):
        return None
    return f"logits that differ from the plain decoder's by {difference:.1g}"


@torch.inference_mode()
def _compute_logit_difference(model: PreTrainedModel, *, captures: bool) -> float:
    """Returns the relative difference between the logits of forked dialogues and those of the
    model's own forward pass."""
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
            _compute_model_logits(model, contexts[copy], tokens.tolist())
            for copy, tokens in zip(copies, steps.T, strict=True)
        ]
    ).float()
    return float((ours - theirs).norm() / theirs.norm())


def _compute_model_logits(model: PreTrainedModel, context: list[int], tokens: list[int]) -> Tensor:
    """Returns the logits after the context and after each of the tokens, `[1 + tokens, V]`."""
    ids = torch.tensor([context + tokens], device=model.device)
    logits: Tensor = model(input_ids=ids).logits[0, len(context) - 1 :]
    return logits
