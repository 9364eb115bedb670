"""The interface to a sampling engine."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from rlx.spec import TurnSpec

__all__ = ["Completion", "CompletionRequest", "Sampler", "SamplingSession"]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for continuations of one context.

    Attributes:
        context: all tokens so far.
        extends: index of the completion that `context` continues, counted over all requests of the
            session's previous `generate`; None for a new context. An engine may use it to keep its
            cache; the result depends on the tokens alone.
        seeds: one per continuation.
        is_last: no later request extends the continuations, so an engine need not keep its cache.
    """

    context: tuple[int, ...]
    extends: int | None
    seeds: tuple[int, ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation.

    Attributes:
        token_ids: its tokens.
        logprobs: their log-probabilities in nats.
        finish_reason: "length" if the token limit ended it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]


class SamplingSession(Protocol):
    """One batch of trees being sampled; engines keep their caches while it is open.

    Attributes:
        longest: context length in tokens.
    """

    @property
    def context_length(self) -> int: ...

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """Returns, for each request, one completion per seed, in order."""
        ...


class Sampler(Protocol):
    """A sampling engine."""

    def session(self) -> AbstractContextManager[SamplingSession]:
        """Opens a session. Weights do not change while it is open, unless completions say which
        sampled them."""
        ...
