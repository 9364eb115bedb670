"""Export the policy of a checkpoint in the Hugging Face layout."""

import os
from pathlib import Path

import torch

from rlx.checkpoint.store import POLICY, read_state
from rlx.errors import RlxError
from rlx.spec import ExperimentSpec

__all__ = ["write_weights"]


def write_weights(spec: ExperimentSpec, checkpoint: Path, folder: Path) -> None:
    """Writes a checkpoint's policy in the Hugging Face layout, as a finished run exports its model.

    Args:
        spec: spec of the run.
        checkpoint: folder of a verified checkpoint.
        folder: folder to create.

    Raises:
        RlxError: the checkpoint holds another model.
        EnvironmentFault: files of the base model are missing.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed probes for devices and logs it
    from transformers.utils.logging import disable_progress_bar

    from rlx.learner import PackedPolicy, load_consolidated_weights, write_model
    from rlx.model import adapt_policy, adapter_weights, build_policy, merged_weights

    disable_progress_bar()
    dtype = getattr(torch, read_state(checkpoint).dtype)
    policy = adapt_policy(build_policy(spec.model, spec.seed), spec.model, spec.seed)
    for parameter in policy.model.parameters():  # not buffers: positions need float32
        parameter.data = parameter.data.to(dtype)
    try:
        PackedPolicy(policy.model).load_state_dict(load_consolidated_weights(checkpoint / POLICY))
    except RuntimeError as error:
        raise RlxError(f"{checkpoint.name} is of another model: {error}") from error
    write_model(policy, merged_weights(policy.model), adapter_weights(policy.model), folder)
