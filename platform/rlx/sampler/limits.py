"""Where a turn has to end, alike for every engine."""

from collections.abc import Callable, Sequence

from rlx.errors import SpecError
from rlx.rollout import Request
from rlx.spec import TurnSpec

__all__ = ["Read", "require_room", "stops"]

Read = Callable[[Sequence[int]], tuple[str, tuple[int, ...]]]
"""See `rlx.rollout.Dialogue.read`."""


def require_room(requests: Sequence[Request], sampling: TurnSpec, longest: int) -> None:
    """Sees that what is asked for fits into `longest` tokens.

    Raises:
        SpecError: a dialogue could outgrow the model.
    """
    context = max((len(request.context) for request in requests), default=0)
    if context + sampling.max_new_tokens > longest:
        raise SpecError(
            f"a dialogue of {context} tokens and max_new_tokens {sampling.max_new_tokens} more "
            f"do not fit into the {longest} that this model holds, or the memory that its sampler "
            "may take: lower max_new_tokens, shorten prompts, or with vLLM raise "
            "sampler.kv_cache_mb (sampler.gpu_memory_utilization on a GPU)"
        )


def stops(read: Read, stop: Sequence[str], tokens: Sequence[int]) -> bool:
    """Whether the newest tokens of a turn complete one of its stop strings."""
    longest = max(len(text.encode()) for text in stop)  # a token may be a byte
    text, _ = read(tokens[-longest - 4 :])
    return any(said in text for said in stop)
