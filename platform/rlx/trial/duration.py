"""Seconds of a training step that a simple model of a GPU expects. Nothing here imports torch.

A level of turns with limit L has R rows on a rank, of which b = min(R, max_rows) are decoded
together. Turns end before their limit: their mean length is f · L, and the share of those that go
on after t tokens is taken to be (1 - t/L)^(1/f - 1), so that the mean length of what is being
written is m = L · f / (1 + f). With the bytes k of a token's keys and values:

    seconds(level) = steps · (weights + layers + b/R · shared · k / bandwidth)
                     + R · f · L · (draw + products + host + (context + m) · k / bandwidth)
    steps          = L · R/b                a batch waits for its longest turn, or
                     L · (f · R/b + 1 - f)  a row that ends is replaced by a waiting one

`weights` is the time to read all parameters, `layers` that of starting each layer's kernels.
`shared` are the tokens of ancestors that rows read together, and `context` those that each row
reads for itself: the transformers sampler reads an ancestor once for all rows below it, vLLM once
for each. An engine with weights of its own waits for them once per step. What is the same for
both engines, such as the reading of prompts, is left out.

Shares of the GPU's peak, `layers`, `draw` and `host` are fitted to what one H200 showed with a
model of 1.5 B parameters (docs/gpu.md). **No figure of vLLM was measured**: its constants are a
judgement from its code and from others' figures, chosen such that it takes about 1.1 times as long
as the transformers sampler on deep trees of long prompts (judged: 39 s for 34), and 0.7 times on
flat groups of long answers (judged: 1 / 1.5 to 1 / 2). Real times may be half or twice as long.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from rlx.plugin import Schedule
from rlx.spec import EnvironmentRolloutSpec, RunnerSpec
from rlx.trial.model_shape import ModelShape
from rlx.trial.token_counts import LevelTokens

__all__ = [
    "FILLED",
    "GPUS",
    "Gpu",
    "SamplingWork",
    "estimate_sampling_seconds",
    "estimate_update_seconds",
    "list_expected_levels",
]

GIB = 1 << 30
DECODED, LEARNED = 0.6, 0.3
"""Shares of a GPU's operations that decoding and updates reach."""
PASSES = 12
"""Times that a draw reads or writes a float32 number per row and token of the vocabulary."""
HOST = 1e-5
"""Seconds of Python per row and token: stop strings, and keeping the books."""
TRANSFER = 10e9
"""Bytes per second of weights that are written to shared memory, and of those that are read."""
FILLED = 0.5
"""Mean length of turns, in limits: nothing is known of them before a run. (A judgement.)"""
PROMPT, QUESTION = 512, 64
"""Tokens of a prompt and of what precedes a later turn, if nothing limits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, by its data sheet.

    Attributes:
        operations: dense bfloat16 operations per second.
        bandwidth: bytes of memory per second.
        memory: bytes that torch finds.
    """

    operations: float
    bandwidth: float
    memory: int


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "4090": Gpu(operations=165e12, bandwidth=1.0e12, memory=22 * GIB),
        "L40S": Gpu(operations=362e12, bandwidth=0.86e12, memory=44 * GIB),
        "A100": Gpu(operations=312e12, bandwidth=2.0e12, memory=78 * GIB),
        "A100-SXM4-40GB": Gpu(operations=312e12, bandwidth=1.6e12, memory=39 * GIB),
        "A100-PCIE-40GB": Gpu(operations=312e12, bandwidth=1.6e12, memory=39 * GIB),
        "H100": Gpu(operations=989e12, bandwidth=3.35e12, memory=78 * GIB),
        "H100 PCIe": Gpu(operations=756e12, bandwidth=2.0e12, memory=78 * GIB),
        "H200": Gpu(operations=989e12, bandwidth=4.8e12, memory=139 * GIB),
    }
)
"""GPUs by what `nvidia-smi` calls them, in part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineSpeed:
    """How an engine decodes.

    Attributes:
        read: share of the bandwidth that its kernels reach.
        layer: seconds of a layer's small kernels in a decoding step.
        wake: seconds per step that it needs to take the GPU from the learner and to be checked.
        is_apart: its weights come through the host's memory.
        refills: a row that ends is replaced at once.
        shares: rows below an ancestor read its keys together.
    """

    read: float
    layer: float
    wake: float
    is_apart: bool
    refills: bool
    shares: bool


_SPEEDS: Mapping[str, _EngineSpeed] = MappingProxyType(
    {
        "transformers": _EngineSpeed(
            read=0.6, layer=1e-4, wake=0.0, is_apart=False, refills=False, shares=True
        ),
        "vllm": _EngineSpeed(
            read=0.8, layer=8e-5, wake=2.0, is_apart=True, refills=True, shares=False
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWork:
    """What is sampled in a step, and by which model.

    Attributes:
        levels: turn levels, first turn first, of all ranks.
        ranks: number of samplers.
        max_rows: rows that one decodes together.
        filled: mean length of turns, in limits.
        width: bytes of a number.
    """

    shape: ModelShape
    levels: tuple[LevelTokens, ...]
    ranks: int
    max_rows: int
    filled: float = 1.0
    width: int = 2

    @property
    def weights(self) -> int:
        """Bytes of all parameters."""
        return self.width * self.shape.parameters

    @property
    def token(self) -> int:
        """Bytes of a token's keys and values."""
        return self.shape.layers * 2 * self.shape.kv_heads * self.shape.head_dim * self.width

    @property
    def sharing(self) -> float:
        """Rows that share a token of context, on average."""
        levels = list(_list_contexts(self))
        alone = sum(level.rows * level.whole for level in levels)
        return alone / sum(level.shared + level.rows * level.own for level in levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LevelContexts:
    """The contexts of one level's rows, on one rank.

    Attributes:
        rows: rows of the level.
        at_most: limit of their turns, in tokens.
        shared: tokens of all their ancestors, each counted once.
        own: tokens of a row's context that no other row has.
        whole: tokens of a row's context.
    """

    rows: float
    at_most: int
    shared: float
    own: float
    whole: float


def _list_contexts(work: SamplingWork) -> Iterator[_LevelContexts]:
    """Yields the contexts of every level: where turns fork, what they continue is shared."""
    shared = own = whole = 0.0
    for level in work.levels:
        own, whole = own + level.opening, whole + level.opening
        if level.turns > level.openings:
            shared, own = shared + level.openings / work.ranks * own, 0.0
        yield _LevelContexts(
            rows=level.turns / work.ranks,
            at_most=level.at_most,
            shared=shared,
            own=own,
            whole=whole,
        )
        own, whole = own + work.filled * level.at_most, whole + work.filled * level.at_most


def estimate_sampling_seconds(
    work: SamplingWork, gpu: Gpu, engine: str = "transformers", cache_bytes: float = inf
) -> float:
    """Seconds in which every rank has sampled its part of a step.

    Args:
        engine: `transformers` or `vllm`.
        cache_bytes: memory for keys and values, if the engine lets rows wait that do not fit.
    """
    speed, shape, filled = _SPEEDS[engine], work.shape, work.filled
    bandwidth = speed.read * gpu.bandwidth
    start = work.weights / bandwidth + speed.layer * shape.layers
    draw = PASSES * 4 * shape.vocabulary / bandwidth
    products = 2 * shape.parameters / (DECODED * gpu.operations)
    seconds = speed.wake + speed.is_apart * 2 * work.weights / TRANSFER
    for level in _list_contexts(work):
        writing = level.at_most * filled / (1 + filled)
        held = level.shared / level.rows + level.own + writing
        fitting = max(1.0, cache_bytes / (held * work.token))
        batch = min(level.rows, work.max_rows, fitting)
        waves = level.rows / batch
        steps = level.at_most * (filled * waves + 1 - filled if speed.refills else waves)
        together, alone = (level.shared, level.own) if speed.shares else (0.0, level.whole)
        read = work.token / bandwidth
        seconds += steps * (start + together / waves * read)
        tokens = level.rows * filled * level.at_most
        seconds += tokens * (draw + products + HOST + (alone + writing) * read)
    return seconds


def estimate_update_seconds(
    runner: RunnerSpec, shape: ModelShape, tokens: float, gpu: Gpu
) -> float:
    """Seconds of one pass over a step's tokens: 6 operations per parameter and token, 8 with
    recomputation.

    Args:
        tokens: those that the learner processes, on all ranks.
    """
    per_token = (8 if runner.activation_checkpointing else 6) * shape.parameters
    return tokens / runner.ranks * per_token / (LEARNED * gpu.operations)


def list_expected_levels(rollout: Schedule) -> tuple[LevelTokens, ...]:
    """The turn levels of a step as far as the settings alone tell. Prompts have as many tokens as
    they may have, if `max_prompt_tokens` limits them."""
    rule = rollout.max_prompt_tokens
    prompt = PROMPT if rule is None else rule.limit or PROMPT
    limits = list(_list_counted_limits(rollout))
    above = rollout.prompts_per_step
    levels = []
    for number, (kind, count, limit) in enumerate(limits):
        levels.append(
            LevelTokens(
                kind=kind,
                turns=above * count,
                openings=above,
                opening=QUESTION if number else prompt,
                made_up=FILLED * limit,
                at_most=limit,
            )
        )
        above *= count
    return tuple(levels)


def _list_counted_limits(rollout: Schedule) -> Iterator[tuple[str, int, int]]:
    """Yields the kind of every level, turns below each of the level before, and their limit."""
    if not isinstance(rollout, EnvironmentRolloutSpec):
        for level in rollout.list_levels():
            yield level.kind, level.count, level.turn.max_new_tokens
        return
    for number in range(rollout.max_turns):
        count = 1 if number else rollout.num_generations * rollout.players
        yield "turn", count, rollout.turn.max_new_tokens
    if rollout.forced_answer is not None:
        yield (
            "forced answer",
            1,
            rollout.forced_answer.max_new_tokens or rollout.turn.max_new_tokens,
        )
