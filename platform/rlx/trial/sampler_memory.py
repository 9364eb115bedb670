"""Memory of sampling: weights, keys and values, and logits."""

from collections.abc import Sequence

from rlx.spec import ExperimentSpec, RunnerSpec
from rlx.trial.model_shape import ModelShape
from rlx.trial.token_counts import LevelTokens

__all__ = ["compute_sampler_bytes", "count_cached_tokens", "get_width"]

COPIES = 1.5
"""Copies of a context's keys and values while it becomes an ancestor of several rows."""
COMPACTED = 1.75
"""Copies of a batch's own keys and values while the quarter of its rows that ended leaves it. Where
steps are captured, a half leaves it at once, which takes no more."""
SET_ASIDE = 0.25
"""More, if that quarter is kept for a later turn."""
DECODING = 3
"""Copies of a decoding step's float32 logits: scaled, as log-probabilities, and for drawing."""


def get_width(runner: RunnerSpec) -> int:
    """Bytes of a number in the learner's precision."""
    return 2 if runner.dtype == "bfloat16" else 4


def count_cached_tokens(
    levels: Sequence[LevelTokens], ranks: float, max_rows: int, *, compacts: bool = True
) -> float:
    """Tokens whose keys and values one rank's sampler holds at most, with turns at their limit.

    `max_rows` dialogues go through all turns together. While the sampler decodes a batch of so many
    turns, it keeps the caches of all that go on; what a batch continues is copied, so that it can
    grow. What no later batch continues is freed after that.

    Args:
        levels: turn levels, first turn first.
        ranks: number of samplers.
        max_rows: rows decoded together.
        compacts: whether some turns end early, so that batches are made smaller.
    """
    going_on = max((level.turns / ranks for level in levels[:-1]), default=0.0)
    if going_on:  # whole prompts go through all turns together
        prompts = levels[0].openings / ranks
        ranks *= max(1.0, prompts / max(1.0, max_rows // (going_on / prompts)))
    peak = rows = own = shared = 0.0  # rows that are kept, their own tokens, and their ancestors'
    for level in levels:
        contexts, turns = level.openings / ranks, level.turns / ranks
        length = own + level.opening
        kept, before = rows * own + shared, rows * own
        forks, last = turns > contexts, level is levels[-1]
        copies = COMPACTED + SET_ASIDE * (not last) if compacts else 1.0
        rows = turns if forks else max(rows, turns)
        together = max(max_rows, turns / max(contexts, 1.0))  # a context's turns are not split
        part = min(1.0, together / max(rows, 1.0))
        later = kept if part < 1.0 else shared  # what is left of it while this batch is decoded
        if forks:  # a context becomes an ancestor, whose keys change their layout
            shared += contexts * length
            read, own = part * contexts * length, float(level.at_most)
            copying, read = COPIES * read, later + read
        else:
            own = length + level.at_most
            copying, read = 0.0, later
        batch = part * rows * own
        ended = 0.0 if last else rows * own + shared + part * before * (part < 1.0)
        peak = max(peak, kept + copying + batch, read + copies * batch, ended)
    return peak


def compute_sampler_bytes(
    spec: ExperimentSpec, shape: ModelShape, levels: Sequence[LevelTokens]
) -> dict[str, int]:
    """Bytes that sampling holds: weights, keys and values of the rows that are decoded together at
    maximum length, and their logits. An engine such as vLLM works within the memory that it is
    given."""
    width = get_width(spec.runner)
    parts = {"the sampler's copy": width * shape.parameters}
    if spec.sampler.holds_weights_apart and spec.runner.device == "cuda":
        return parts  # the cache takes what else the engine is given
    if spec.sampler.holds_weights_apart:
        parts["weights on their way to the sampler"] = width * shape.parameters
    if spec.sampler.cache_bytes is not None:
        return parts | {"the sampler's cache": spec.sampler.cache_bytes}
    most = max(level.turns for level in levels)
    rows = min(spec.sampler.max_rows, -(-most // spec.runner.ranks))
    each = shape.layers * 2 * shape.kv_heads * shape.head_dim * width
    cached = count_cached_tokens(levels, spec.runner.ranks, spec.sampler.max_rows)
    return parts | {
        "the sampler's cache": int(cached) * each,
        "logits of a decoding step": DECODING * 4 * rows * shape.vocabulary,
    }
