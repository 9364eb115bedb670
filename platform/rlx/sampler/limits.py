"""Context limits and stop strings, the same for every engine."""

import sys
from collections.abc import Callable, Sequence

from rlx.errors import SpecError
from rlx.rollout import CompletionRequest
from rlx.spec import TurnSpec

__all__ = ["Read", "completes_stop_string", "require_context_room"]

Read = Callable[[Sequence[int]], tuple[str, tuple[int, ...]]]
"""See `rlx.rollout.Dialogue.read`."""


def require_context_room(
    requests: Sequence[CompletionRequest], sampling: TurnSpec, model: int, memory: int = sys.maxsize
) -> None:
    """Checks that the requested completions fit into the context length.

    Args:
        requests: requests whose contexts will grow.
        sampling: its `max_new_tokens` is the maximum growth.
        model: maximum dialogue length of the model, in tokens.
        memory: maximum dialogue length that fits into the sampler's KV cache, in tokens.

    Raises:
        SpecError: a dialogue could exceed one of them.
    """
    context = max((len(request.context) for request in requests), default=0)
    if context + sampling.max_new_tokens <= min(model, memory):
        return
    holds, besides = (
        (f"this model's limit of {model}", "")
        if model <= memory
        else (
            f"vLLM's memory for {memory}",
            ", or raise sampler.kv_cache_mb (sampler.gpu_memory_utilization on a GPU)",
        )
    )
    raise SpecError(
        f"a dialogue of {context} tokens plus max_new_tokens {sampling.max_new_tokens} does not "
        f"fit into {holds}: lower max_new_tokens, shorten prompts{besides}"
    )


def completes_stop_string(read: Read, stop: Sequence[str], tokens: Sequence[int]) -> bool:
    """Whether the newest tokens of a turn complete one of its stop strings."""
    longest = max(len(text.encode()) for text in stop)  # a token may be a single byte
    text, _ = read(tokens[-longest - 4 :])
    return any(stop_string in text for stop_string in stop)
