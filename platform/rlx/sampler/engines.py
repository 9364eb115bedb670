"""Which engine an experiment samples with, behind one protocol."""

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
    """A sampler whose weights follow a learner's.

    Attributes:
        description: how it computes, for the run's record.
    """

    @property
    def description(self) -> str: ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over whole weights, by the plain model's names, before it returns."""
        ...


def require_engine(spec: SamplerSpec) -> None:
    """Sees that the engine is installed, before any model is loaded.

    Raises:
        EnvironmentFault: it is not.
    """
    if isinstance(spec, VllmSpec):
        require_vllm()


@contextmanager
def open_sampler(
    policy: Policy, spec: SamplerSpec, runner: RunnerSpec, device: torch.device
) -> Iterator[SamplingEngine]:
    """Starts an engine with weights of its own, in the learner's precision, and ends it.

    Args:
        policy: stays as it is.
        spec: the `sampler:` section.
        runner: precision and threads.
        device: where to sample.

    Raises:
        EnvironmentFault: the engine is not installed.
        RlxError: it cannot run this model.
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
    """The same model once more, with its parameters in another precision."""
    model = copy.deepcopy(policy.model)
    for parameter in model.parameters():  # buffers stay: positions need float32
        parameter.data = parameter.data.to(dtype)
    return replace(policy, model=model)
