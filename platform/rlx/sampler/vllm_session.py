"""A session of sampling with vLLM, whatever process generates."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlx.errors import SpecError
from rlx.rollout import Completion, CompletionRequest
from rlx.sampler.draw import require_finite_logits
from rlx.sampler.limits import require_context_room
from rlx.spec import TurnSpec
from rlx.spec import VllmSamplerSpec as VllmSpec

__all__ = ["Row", "RowSampler", "VllmSession", "build_row_request"]

Row = tuple[tuple[int, ...], int]
"""Context and seed."""


class RowSampler(Protocol):
    """What a session asks for rows.

    Attributes:
        limits: maximum dialogue length of the model, and the one that fits into the KV cache, both
            in tokens.
        steps: the training step after which weights were, by their version; empty if they do not
            change while rows are generated.
    """

    limits: tuple[int, int]

    @property
    def steps(self) -> Mapping[int, int]: ...

    @property
    def context_length(self) -> int:
        """Maximum dialogue length, in tokens."""
        ...

    def make_room(self, length: int) -> None:
        """Prepares for dialogues of so many tokens, as far as that is possible."""
        ...

    def generate(self, rows: list[Row], sampling: TurnSpec) -> list[Any]:
        """Returns tokens, log-probabilities, finish reason, and runs of tokens with the version of
        the weights that sampled them, for every row."""
        ...


class VllmSession:
    """Stateless: vLLM's prefix cache recognizes contexts by their tokens."""

    def __init__(self, sampler: RowSampler) -> None:
        self._sampler = sampler

    @property
    def context_length(self) -> int:
        """See `rlx.rollout.SamplingSession`."""
        return self._sampler.context_length

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """One completion per seed of every request. See `rlx.rollout.SamplingSession`.

        Raises:
            SpecError: a dialogue could outgrow the model, or the temperature is too low for vLLM.
            RlxError: vLLM failed.
        """
        longest = max((len(request.context) for request in requests), default=0)
        self._sampler.make_room(longest + sampling.max_new_tokens)
        require_context_room(requests, sampling, *self._sampler.limits)
        if sampling.temperature < (coldest := VllmSpec.min_temperature):
            raise SpecError(
                f"temperature is {sampling.temperature:g}, but vLLM's minimum is {coldest:g}: use "
                "top_k: 1 to take the most likely tokens"
            )
        rows = [(request.context, seed) for request in requests for seed in request.seeds]
        completions = iter(self._sampler.generate(rows, sampling) if rows else ())
        steps = self._sampler.steps
        return [
            tuple(_build_completion(steps, *next(completions)) for _ in r.seeds) for r in requests
        ]


def build_row_request(rows: Sequence[Row], sampling: TurnSpec) -> Mapping[str, Any]:
    """The message that asks a worker for completions of rows."""
    settings = sampling.model_dump(mode="json", exclude={"template", "spans"})
    return {"ask": "generate", "rows": rows, "sampling": settings}


def _build_completion(
    steps: Mapping[int, int],
    tokens: list[int],
    logprobs: list[float],
    reason: str,
    runs: Sequence[tuple[int, int]],
) -> Completion:
    require_finite_logits([logprobs])
    sampled_after = tuple((count, steps[version]) for count, version in runs) if steps else ()
    return Completion(
        tuple(tokens), tuple(logprobs), "stop" if reason == "stop" else "length", sampled_after
    )
