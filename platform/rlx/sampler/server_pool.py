"""What a sampler asks of a pool of vLLM servers, wherever they are."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

__all__ = ["ADAPT", "LOAD", "ServerFacts", "ServerPool"]

LOAD, ADAPT = "load", "adapt"
"""Kinds of weights: those of the whole model, and those of an adapter beside them."""


class ServerFacts(NamedTuple):
    """What a server says of itself.

    Attributes:
        longest: maximum dialogue length that fits into its KV cache, in tokens.
        takes_adapter: whether it takes LoRA adapters beside the weights.
        refusal: why vLLM takes no adapters of this model; None if it does, or is not asked to, or
            if another rank knows.
    """

    longest: int
    takes_adapter: bool
    refusal: str | None


class ServerPool(Protocol):
    """The servers of a pool, which all ranks that belong to it ask.

    Attributes:
        publishes: whether this rank sends them the learner's weights.
        place: where they are, in words.
    """

    publishes: bool
    place: str

    @property
    def restarts(self) -> int:
        """How often a server was replaced; 0 on all ranks but the one that publishes."""
        ...

    def describe(self) -> list[ServerFacts]:
        """Waits until all servers are up.

        Raises:
            RlxError: one cannot start.
            ConnectionError: the pool is lost.
        """
        ...

    def publish(self, kind: str, version: int, weights: Mapping[str, Tensor]) -> None:
        """Sends all servers weights; of those of a model drops an adapter that was sent before.

        Args:
            kind: `LOAD` or `ADAPT`.
            version: their number, which requests name.
            weights: on the host, in the servers' precision.

        Raises:
            RlxError: a server rejects them, or has ended too often.
        """
        ...

    def ask(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a server a request for rows; waits for the answer, also of one that replaces it.

        Raises:
            RlxError: the pool has failed, or this rank has left it.
            ConnectionError: the pool is lost.
        """
        ...

    def close(self) -> None:
        """Leaves the pool, also while a thread waits for an answer; it ends with the rank that
        publishes."""
        ...
