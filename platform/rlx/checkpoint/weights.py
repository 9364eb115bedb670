"""Export the policy of a checkpoint in the Hugging Face layout."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from rlx.checkpoint.store import POLICY, read_state
from rlx.errors import DivergedModelError, RlxError
from rlx.spec import ExperimentSpec


def write_weights(
    spec: ExperimentSpec, checkpoint: Path, folder: Path, tokenizer: Path | None = None
) -> None:
    """Writes a checkpoint's policy in the Hugging Face layout, as a finished run exports its model.

    Args:
        spec: spec of the run.
        checkpoint: folder of a verified checkpoint.
        folder: folder to create.
        tokenizer: `RunFolder.tokenizer` of the run.

    Raises:
        RlxError: the checkpoint holds another model.
        DivergedModelError: its weights, or the logits that they give, are not finite.
        EnvironmentFault: files of the base model are missing.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed probes for devices and logs it
    from transformers.utils.logging import disable_progress_bar

    from rlx.learner import PackedPolicy, load_consolidated_weights, write_model
    from rlx.model import adapt_policy, adapter_weights, build_policy, merged_weights

    disable_progress_bar()
    dtype = getattr(torch, read_state(checkpoint).dtype)
    policy = build_policy(spec.model, spec.seed, tokenizer, dtype=dtype)
    adapt_policy(policy, spec.model, spec.seed)
    try:
        PackedPolicy(policy.model).load_state_dict(load_consolidated_weights(checkpoint / POLICY))
    except RuntimeError as error:
        raise RlxError(f"{checkpoint.name} belongs to another model: {error}") from error
    weights = merged_weights(policy.model)
    _require_sound_model(policy.model, weights, checkpoint.name)
    write_model(policy, weights, adapter_weights(policy.model), folder)


@torch.no_grad()
def _require_sound_model(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor], name: str
) -> None:
    for parameter, value in weights.items():
        if not value.isfinite().all():
            raise DivergedModelError(f"{name} is not sound: its {parameter} is not finite")
    if not model(input_ids=torch.tensor([[0, 1]])).logits.isfinite().all():
        raise DivergedModelError(f"{name} is not sound: the model's logits are not finite")
