"""What a sampling engine is asked, and what it gives."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from rlx.spec import TurnSpec

__all__ = ["Completion", "CompletionRequest", "Sampler", "SamplingSession"]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Continuations wanted of one context.

    Attributes:
        context: every token so far.
        extends: which completion of the session's previous `generate`, counted over all of its
            requests, `context` continues; None for a new context. An engine may use it to keep
            its cache; the tokens alone decide the result.
        seeds: one per continuation.
    """

    context: tuple[int, ...]
    extends: int | None
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation: its tokens, their log-probabilities in nats, and why it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]


class SamplingSession(Protocol):
    """One batch of trees being grown; engines keep their caches for as long as it lasts.

    Attributes:
        longest: tokens of a dialogue that the model can hold.
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
        """Opens a session; weights do not change while it is open."""
        ...
