"""Opens the sampling engine of an experiment, behind one protocol."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from rlx.model import Policy
from rlx.rollout import Sampler
from rlx.sampler.transformers_engine import TransformersSampler
from rlx.sampler.vllm_engine import VllmSampler, require_vllm
from rlx.spec import RunnerSpec, SamplerSpec
from rlx.spec import VllmSamplerSpec as VllmSpec

__all__ = [
    "SamplingEngine",
    "TransformersSampler",
    "VllmSampler",
    "copy_policy",
    "open_sampler",
    "require_engine",
]


class SamplingEngine(Sampler, Protocol):
    """A sampler whose weights are synchronized with a learner's.

    Attributes:
        description: how the engine computes, for the run's record.
    """

    @property
    def description(self) -> str: ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Loads full weights, under the plain model's parameter names, before it returns."""
        ...


def require_engine(spec: SamplerSpec) -> None:
    """Checks that the engine is installed, before any model is loaded.

    Raises:
        EnvironmentFault: the engine is not installed.
    """
    if isinstance(spec, VllmSpec):
        require_vllm()


@contextmanager
def open_sampler(
    policy: Policy, spec: SamplerSpec, runner: RunnerSpec, device: torch.device
) -> Iterator[SamplingEngine]:
    """Context manager: starts an engine with its own weights, in the learner's precision.

    Args:
        policy: not modified.
        spec: the `sampler:` section.
        runner: precision and threads.
        device: the device to sample on.

    Raises:
        EnvironmentFault: the engine is not installed.
        RlxError: the engine cannot run this model.
    """
    if isinstance(spec, VllmSpec):
        sampler = VllmSampler(policy, spec, runner, device)
        try:
            yield sampler
        finally:
            sampler.close()
    else:
        own = copy_policy(policy, getattr(torch, runner.dtype))
        yield TransformersSampler(own, max_rows=spec.max_rows, device=device)


def copy_policy(policy: Policy, dtype: torch.dtype) -> Policy:
    """Returns a copy of the policy with its parameters in another precision."""
    model = copy.deepcopy(policy.model)
    for parameter in model.parameters():  # buffers are not converted: positions need float32
        parameter.data = parameter.data.to(dtype)
    return replace(policy, model=model)
