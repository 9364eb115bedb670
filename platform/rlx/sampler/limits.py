"""Context limits and stop strings, the same for every engine."""

import sys
from collections.abc import Callable, Sequence

from rlx.errors import SpecError
from rlx.rollout import CompletionRequest
from rlx.spec import ExperimentSpec, TurnSpec

__all__ = ["Read", "StopStringDetector", "expect_dialogue_length", "require_context_room"]

PROMPT = 1024
"""Tokens of a prompt with all questions, if nothing limits them."""

Read = Callable[[Sequence[int]], tuple[str, tuple[int, ...]]]
"""See `rlx.rollout.Dialogue.read`."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What part of a character decodes to."""


def expect_dialogue_length(spec: ExperimentSpec) -> int:
    """The tokens that the dialogues of an experiment may need, as far as the spec says: those of
    all turns in a row, of any phase, and of a prompt. Observations are not counted."""
    rollouts = [spec.rollout, *(spec.resolve_phase_spec(phase).rollout for phase in spec.phases)]
    rules = [rollout.max_prompt_tokens for rollout in rollouts]
    prompts = [PROMPT if rule is None else rule.limit or PROMPT for rule in rules]
    turns = [sum(rollout.budgets.values()) for rollout in rollouts]
    return max(map(sum, zip(turns, prompts, strict=True)))


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


class StopStringDetector:
    """Finds the token that completes a stop string.

    Decoding a row costs far more than sampling its token. A row is therefore decoded only when its
    newest token may contain the last character of a stop string.

    Args:
        read: decodes the tokens of a turn.
        stop: stop strings; none of them is empty.
    """

    def __init__(self, read: Read, stop: Sequence[str]) -> None:
        self._read, self._stop = read, tuple(stop)
        self._window = max(len(text.encode()) for text in stop) + 4  # a token may be a single byte
        self._last = {*(text[-1] for text in stop), INCOMPLETE}
        self._may_complete: dict[int, bool] = {}

    def completes(self, tokens: Sequence[int]) -> bool:
        """Whether the newest of the tokens of a turn completes a stop string."""
        newest = tokens[-1]
        if newest not in self._may_complete:
            # A tokenizer may drop the space before the first token of a text, never later ones.
            text, _ = self._read((newest, newest))
            self._may_complete[newest] = not self._last.isdisjoint(text)
        return self._may_complete[newest] and self._is_in_text(tokens[-self._window :])

    def _is_in_text(self, tokens: Sequence[int]) -> bool:
        text, _ = self._read(tokens)
        return any(stop_string in text for stop_string in self._stop)
