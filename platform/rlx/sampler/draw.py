"""Samples tokens from logits: temperature, top-k, top-p, and seeded uniform noise."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlx.errors import DivergedModelError, SpecError
from rlx.rollout import CompletionRequest
from rlx.spec import ExperimentSpec, TurnSpec

LARGE = 8192
"""Tokens of a vocabulary above which a token is found by blocks of the vocabulary."""

BLOCK = 256
"""Tokens per block."""


def compute_sampling_logprobs(logits: Tensor, sampling: TurnSpec) -> Tensor:
    """Returns the log-probabilities of the distribution that is sampled from.

    Applies the temperature, then top-k, then top-p (the smallest set of tokens whose probability
    reaches `top_p`), and renormalizes.

    Args:
        logits: `[R, V]`.

    Returns:
        `[R, V]` float32 nats; -inf for tokens that cannot be sampled.
    """
    logits = logits.float()
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    if sampling.top_k:
        least = logprobs.topk(min(sampling.top_k, logprobs.shape[-1])).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logprobs.sort(dim=-1, descending=True)
        mass = ordered.softmax(dim=-1)
        outside = mass.cumsum(dim=-1) - mass >= sampling.top_p
        logprobs = logprobs.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    if sampling.top_k or sampling.top_p < 1:
        logprobs = logprobs.log_softmax(dim=-1)
    return logprobs


def sample_uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """Returns `[R, length]` float64 in [0, 1); row r depends only on seed r."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(length) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def sample_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Samples one token per row by inverting the cumulative distribution function.

    Args:
        logprobs: `[R, V]` from `compute_sampling_logprobs`.
        uniform: `[R]` in [0, 1).

    Returns:
        `[R]` int64 tokens, each with probability above 0; the last token for a row of NaN, which
            `require_finite_logits` reports later.
    """
    count = logprobs.shape[-1]
    uniform = uniform.to(logprobs.device)[:, None]
    if count > LARGE:
        return _sample_by_blocks(logprobs, uniform).clamp_(max=count - 1)
    mass = logprobs.double().exp().cumsum(dim=-1)
    token = torch.searchsorted(mass, uniform * mass[:, -1:], right=True).squeeze(-1)
    return token.clamp_(max=count - 1)


def _sample_by_blocks(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Finds the block of tokens, then the token: the mass of all is summed, but not cumulated."""
    rows, count = logprobs.shape
    blocks = -(-count // BLOCK)
    mass = logprobs.new_zeros(rows, blocks * BLOCK)
    torch.exp(logprobs, out=mass[:, :count])
    by_block = mass.view(rows, blocks, BLOCK)
    sums = by_block.sum(dim=-1, dtype=torch.float64)
    until = sums.cumsum(dim=-1)
    threshold = uniform * until[:, -1:]
    block = torch.searchsorted(until, threshold, right=True).clamp_(max=blocks - 1)
    within = by_block.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(dim=-1)
    rest = threshold - (until - sums).gather(1, block)
    # Rounding may leave a rest outside the block, where tokens without mass could be met.
    rest = torch.minimum(rest.clamp_(min=0), within[:, -1:] * (1 - 2.0**-52))
    token = torch.searchsorted(within, rest, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + token).squeeze(-1)


def require_finite_logits(logprobs: Iterable[Sequence[float]]) -> None:
    """Raises DivergedModelError if log-probabilities of sampled tokens are NaN, as the logits then
    were."""
    if any(math.isnan(value) for row in logprobs for value in row):
        raise DivergedModelError(
            "the model's logits are NaN: its weights have diverged, usually because "
            "optimizer.learning_rate or optimizer.max_grad_norm is too high, or a reward is extreme"
        )


PROMPT = 1024
"""Tokens of a prompt with all questions, if nothing limits them."""

Read = Callable[[Sequence[int]], tuple[str, tuple[int, ...]]]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What part of a character decodes to."""


def expect_dialogue_length(spec: ExperimentSpec) -> int:
    """The tokens of the longest dialogue of an experiment, as far as the spec says: of a prompt and
    all turns in a row, of any phase. Observations are not counted."""
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
        model: maximum dialogue length of the model, in tokens.
        memory: maximum dialogue length that fits into the sampler's KV cache, in tokens.

    Raises:
        SpecError: a dialogue could exceed one of them.
    """
    sizes = [(len(request.context), request.limit_tokens(sampling)) for request in requests]
    context, limit = max(sizes, key=sum, default=(0, sampling.max_new_tokens))
    if context + limit <= min(model, memory):
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
        f"a dialogue of {context} tokens plus max_new_tokens {limit} does not fit into {holds}: "
        f"lower max_new_tokens, shorten prompts{besides}"
    )


class StopStringDetector:
    """Finds the token that completes a stop string.

    Decoding a row costs far more than sampling its token, so a row is decoded only when its newest
    token may contain the last character of a stop string.
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
        if not self._may_complete[newest]:
            return False
        text, _ = self._read(tokens[-self._window :])
        return any(stop_string in text for stop_string in self._stop)
