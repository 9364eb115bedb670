"""Opens the sampling engine of an experiment, behind one protocol."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from rlx.discovery import import_implementation
from rlx.errors import EnvironmentFault
from rlx.model import Policy, copy_model
from rlx.rollout import Sampler
from rlx.sampler.drift import SamplerDrift
from rlx.sampler.transformers_engine import TransformersSampler
from rlx.sampler.vllm_engine import VllmSampler, require_vllm
from rlx.sampler.vllm_pool import PoolSampler
from rlx.spec import RunnerSpec, SamplerSpec, TransformersSamplerSpec
from rlx.spec import VllmSamplerSpec as VllmSpec

__all__ = [
    "AdaptableEngine",
    "PoolSampler",
    "SamplingEngine",
    "TransformersSampler",
    "VllmSampler",
    "copy_policy",
    "count_servers",
    "load_weights",
    "name_weights",
    "open_sampler",
    "open_transformers",
    "open_vllm",
    "release_memory",
    "require_engine",
    "takes_adapter",
    "tell_ages",
]


class SamplingEngine(Sampler, Protocol):
    """A sampler whose weights are synchronized with a learner's.

    Attributes:
        description: how the engine computes, for the run's record.
        restarts: how often a process of the engine was restarted.
        drift: how far its log-probabilities are from the learner's since the last `load`; a run
            sets it, if the engine has its own model.
    """

    drift: SamplerDrift | None

    @property
    def restarts(self) -> int: ...
    @property
    def description(self) -> str: ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Loads full weights, under the plain model's parameter names, before it returns."""
        ...


class AdaptableEngine(SamplingEngine, Protocol):
    """An engine that takes LoRA adapters beside the weights; see `takes_adapter`."""

    def load_adapter(self, weights: Mapping[str, Tensor]) -> None:
        """Loads A and B of every adapted layer, under peft's names, before it returns. They are
        added to the weights of the last `load`, in place of those of an adapter before."""
        ...


def takes_adapter(sampler: SamplingEngine) -> TypeGuard[AdaptableEngine]:
    """Whether an engine takes adapters of its policy's `lora`.

    An engine need not have the attribute `takes_adapter`; then it loads merged weights.
    """
    return bool(getattr(sampler, "takes_adapter", False))


def load_weights(sampler: SamplingEngine, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Loads weights as they come, so that no more than one beside the engine's own is in memory.

    An engine need not have the method `load_each`; then it gets all of them at once.
    """
    load_each = getattr(sampler, "load_each", None)
    if load_each is None:
        sampler.load(dict(weights))
    else:
        load_each(weights)


def name_weights(sampler: SamplingEngine, step: int, *, are_new: bool = True) -> None:
    """Tells an engine the training step after which the weights are that it gets next.

    An engine need not have the method `name_weights`. One that takes weights while it samples has
    it, so that it can say which sampled which token.

    Args:
        are_new: false if the step left the weights as they were, and the engine has them.
    """
    tell = getattr(sampler, "name_weights", None)
    if tell is not None:
        tell(step, are_new=are_new)


def tell_ages(sampler: SamplingEngine) -> None:
    """Has an engine that takes weights while it samples say which sampled which token.

    An engine need not have the method `tell_ages`; then it keeps its weights while it samples.
    """
    tell = getattr(sampler, "tell_ages", None)
    if tell is not None:
        tell()


def count_servers(sampler: SamplingEngine) -> int:
    """Number of processes that share the rows of a request.

    An engine need not have the attribute `servers`; then it is one.
    """
    return int(getattr(sampler, "servers", 1))


def release_memory(sampler: SamplingEngine) -> None:
    """Lets an engine that shares the learner's GPU release its memory before the learner computes.

    An engine need not have the method `release`; one that has it takes its memory back on demand.
    """
    release = getattr(sampler, "release", None)
    if release is not None:
        release()


def require_engine(spec: SamplerSpec) -> None:
    """Checks that the engine is installed, before any model is loaded.

    Raises:
        EnvironmentFault: the engine is not installed, or lacks something that it reads.
    """
    if isinstance(spec, VllmSpec):
        require_vllm()
    try:
        spec.check()
    except (OSError, ImportError, ValueError) as error:
        raise EnvironmentFault(
            f"sampler.engine {spec.engine!r} cannot run here: {error}"
        ) from error


def open_sampler(
    policy: Policy, spec: SamplerSpec, runner: RunnerSpec, device: torch.device
) -> AbstractContextManager[SamplingEngine]:
    """Context manager: starts the engine that `spec` names, with its own weights, in the learner's
    precision.

    Args:
        policy: not modified.
        spec: the `sampler:` section.
        runner: precision and threads.
        device: the device to sample on.

    Raises:
        EnvironmentFault: the engine is not installed.
        PluginError: its implementation cannot be imported.
        RlxError: the engine cannot run this model.
    """
    open_engine = import_implementation(type(spec).implementation)
    opened: AbstractContextManager[SamplingEngine] = open_engine(policy, spec, runner, device)
    return opened


@contextmanager
def open_transformers(
    policy: Policy, spec: TransformersSamplerSpec, runner: RunnerSpec, device: torch.device
) -> Iterator[SamplingEngine]:
    """See `open_sampler`."""
    own = copy_policy(policy, getattr(torch, runner.dtype), device)
    yield TransformersSampler(own, max_rows=spec.max_rows, device=device)


@contextmanager
def open_vllm(
    policy: Policy, spec: VllmSpec, runner: RunnerSpec, device: torch.device
) -> Iterator[SamplingEngine]:
    """See `open_sampler`."""
    kind = VllmSampler if spec.pool is None else PoolSampler
    sampler = kind(policy, spec, runner, device)
    try:
        yield sampler
    finally:
        sampler.close()


def copy_policy(policy: Policy, dtype: torch.dtype, device: torch.device | None = None) -> Policy:
    """Returns a copy of the policy with its parameters in another precision, on another device."""
    return replace(policy, model=copy_model(policy.model, device, dtype))
