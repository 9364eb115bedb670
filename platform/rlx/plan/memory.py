"""Dimensions of a model, and the tokens and memory of one training step, without torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from rlx.rollout import NO_PARENT, count_shared
from rlx.spec import (
    ExperimentSpec,
    Lora,
    ModelFiles,
    ModelSpec,
    RunnerSpec,
    SamplerSpec,
    TinyModelSpec,
    VllmSamplerSpec,
)

if TYPE_CHECKING:
    from rlx.phase_setup import PhaseSetup
    from rlx.rollout import RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a Llama-style decoder.

    Attributes:
        positions: context length in tokens, without sliding windows; None if it is not stated.
        tied: the output embedding is the input embedding.
        small: parameters of a layer's biases and of the norms within its heads.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    positions: int | None
    tied: bool
    small: int = 0

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each of a layer's matrices."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, wide),
            "k_proj": (self.hidden, narrow),
            "v_proj": (self.hidden, narrow),
            "o_proj": (wide, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def parameters(self) -> int:
        layer = sum(a * b for a, b in self.linears.values()) + 2 * self.hidden + self.small
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    def count_learned(self, lora: Lora | None) -> int:
        """Parameters that learn: all, or those of LoRA adapters."""
        if lora is None:
            return self.parameters
        every = "all-linear" in lora.targets
        chosen = [d for name, d in self.linears.items() if every or name in lora.targets]
        return self.layers * sum(lora.rank * (a + b) for a, b in chosen)


_QWEN = {"kv_heads": 2, "head_dim": 128, "vocabulary": 151_936, "tied": True}
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "0.5B": {**_QWEN, "hidden": 896, "layers": 24, "heads": 14, "intermediate": 4864}
    | {"head_dim": 64},
    "1.5B": {**_QWEN, "hidden": 1536, "layers": 28, "heads": 12, "intermediate": 8960},
    "3B": {**_QWEN, "hidden": 2048, "layers": 36, "heads": 16, "intermediate": 11_008},
    "7B": {**_QWEN, "hidden": 3584, "layers": 28, "heads": 28, "intermediate": 18_944}
    | {"kv_heads": 4, "vocabulary": 152_064, "tied": False},
}
KNOWN = {
    f"Qwen/Qwen2.5-{size}{kind}": ModelShape(
        **numbers,
        positions=None,
        small=(numbers["heads"] + 2 * numbers["kv_heads"]) * numbers["head_dim"],
    )
    for size, numbers in _SIZES.items()
    for kind in ("", "-Instruct")
} | {
    "experiments/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": ModelShape(
        vocabulary=49_152,
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        positions=8192,
        tied=True,
    )
}
"""Dimensions of the models that the experiments name, from their published configurations: plans
need no files."""


@dataclass(frozen=True, slots=True)
class DiskEstimate:
    """Bytes of a run on disk: one checkpoint, the most `checkpoints` at a time, the whole while it
    trains, and what stays."""

    checkpoint: int
    checkpoints: int
    training: int
    finished: int


def estimate_disk(spec: ExperimentSpec, shape: ModelShape) -> DiskEstimate:
    """Estimates it without the run's records. A checkpoint holds the weights, and for what learns
    Adam's moments and a float32 copy."""
    rule, width = spec.runner.checkpoint, get_width(spec.runner)
    learned = shape.count_learned(getattr(spec.model, "lora", None))
    state = 8 + 4 * (width == 2 or spec.runner.zero_stage > 0)
    each = width * shape.parameters + state * learned
    each += 0 if spec.critic is None else (width + state) * shape.parameters
    written = -(-spec.steps // rule.every) if rule.every else 0
    most = min(rule.keep + 1, written)  # one is written before the oldest is removed
    model = 4 * shape.parameters
    kept = min(rule.keep, written) if spec.keeps_finished_checkpoints else 0
    return DiskEstimate(each, most, most * each + model, kept * each + model)


def load_model_shape(
    spec: ModelSpec | ModelFiles, vocabulary: int | None = None
) -> ModelShape | None:
    """Reads the model's dimensions; None if the configuration is not on this machine and not
    `KNOWN`, or describes another architecture.

    Args:
        vocabulary: number of tokens of a tiny model; None reads it from its tokenizer.
    """
    from rlx.model import find_local_files, load_vocabulary

    if isinstance(spec, TinyModelSpec):
        return ModelShape(
            vocabulary=vocabulary or len(load_vocabulary(spec)),
            hidden=spec.hidden_size,
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            positions=spec.max_position,
            tied=True,
            small=2 * spec.head_dim,
        )
    folder = find_local_files(spec)
    if folder is None:
        return KNOWN.get(spec.path)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        small = {"qwen3": 2 * head_dim, "qwen2": (heads + 2 * kv_heads) * head_dim}
        return ModelShape(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=config["intermediate_size"],
            positions=config.get("max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings", False)),
            small=small.get(config["model_type"], 0),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


# Tokens of a step --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTokens:
    """Tokens of one turn level in a step; with an environment, of one turn number.

    Attributes:
        turns: turns sampled per step; with an environment, as many as the synthetic rollouts have.
        openings: prompts, questions or observations that precede these turns, per step.
        opening: mean tokens of one of them.
        made_up: mean tokens of a synthetic turn.
        at_most: `max_new_tokens`.
    """

    kind: str
    turns: int
    openings: int
    opening: float
    made_up: float
    at_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Tokens of one step. Pairs are (with synthetic lengths, upper bound).

    Attributes:
        sampled: tokens that the policy samples.
        shared: tokens the learner processes, with each shared prefix counted once.
        common: tokens with which all prompts begin; every rank processes them.
    """

    levels: tuple[LevelTokens, ...]
    sampled: tuple[float, float]
    shared: tuple[float, float]
    common: int

    @property
    def longest(self) -> float:
        """Tokens of a dialogue with turns at their limit and openings of synthetic length."""
        return sum(level.opening + level.at_most for level in self.levels)


def token_budget(setup: "PhaseSetup", trees: "Sequence[RolloutTree]") -> TokenBudget:
    """Counts the tokens of a step, with turns of synthetic length and with turns at their limit;
    observations have the length that they have in the synthetic rollouts."""
    talk = setup.plan.talk
    prompts = [tree.segments[0].token_ids for tree in trees]
    common = count_shared(prompts) if len(prompts) > 1 else 0  # of one it is not known
    count = _count_level_tokens if talk is None else _count_dialogue_tokens
    levels = tuple(count(setup, trees))
    first, again = levels[0], setup.spec.rollout.dynamic_sampling
    sampled, shared = [], []
    for at_limit in (False, True):
        written, read = 0.0, -common * (first.openings - 1.0)
        for level in levels:
            # At the limit, every dialogue has all turns.
            all_turns = at_limit and talk is not None
            turns = first.turns if all_turns else level.turns
            openings = turns if all_turns and level is not first else level.openings
            written += turns * (level.at_most if at_limit else level.made_up)
            read += openings * level.opening
        shared.append(written + read)
        if "greedy_scores" in setup.needs:  # greedy answers are sampled, but not trained on
            written += first.openings * (first.at_most if at_limit else first.made_up)
        sampled.append(written * (again.max_batches if again and at_limit else 1))
    return TokenBudget(
        levels=levels,
        sampled=(sampled[0], sampled[1]),
        shared=(shared[0], shared[1]),
        common=common,
    )


def _count_level_tokens(
    setup: "PhaseSetup", trees: "Sequence[RolloutTree]"
) -> Iterator[LevelTokens]:
    above = setup.spec.rollout.prompts_per_step
    for number, level in enumerate(setup.plan.levels, start=1):
        openings, turns = _list_turn_lengths(trees, number)
        yield LevelTokens(
            kind=level.kind,
            turns=above * level.count,
            openings=above,
            opening=mean(openings),
            made_up=mean(turns),
            at_most=level.turn.max_new_tokens,
        )
        above *= level.count


def _count_dialogue_tokens(
    setup: "PhaseSetup", trees: "Sequence[RolloutTree]"
) -> Iterator[LevelTokens]:
    prompts, talk = setup.spec.rollout.prompts_per_step, setup.plan.talk
    assert talk is not None
    observations = [n for k in range(2, talk.last + 1) for n in _list_turn_lengths(trees, k)[0]]
    sampled = len(_list_turn_lengths(trees, 1)[1])
    for number in range(1, talk.last + 1):
        openings, turns = _list_turn_lengths(trees, number)
        if number == 1:
            openings = [len(tree.segments[0].token_ids) for tree in trees]
        rollouts = round(prompts * talk.count * talk.players * len(turns) / max(1, sampled))
        yield LevelTokens(
            kind=f"turn {number}" if number <= talk.max_turns else "forced answer",
            turns=rollouts,
            openings=prompts if number == 1 else rollouts,
            opening=mean(openings or observations or [0]),
            made_up=mean(turns or [0]),
            at_most=talk.sampling(number).max_new_tokens,
        )


def _list_turn_lengths(trees: "Sequence[RolloutTree]", number: int) -> tuple[list[int], list[int]]:
    """Token counts of the openings and of the synthetic turns with this turn number."""
    pairs = [
        (len(tree.segments[s.parent].token_ids), len(s.token_ids))
        for tree in trees
        for s in tree.segments
        if s.turn == number and s.parent != NO_PARENT
    ]
    return [opening for opening, _ in pairs], [turn for _, turn in pairs]


# Memory of a step --------------------------------------------------------------------------------
WHOLE_LOGITS, CHUNK = 2 << 30, 8192
"""As in the learner (`rlx.learner.forward`, `rlx.learner.learner`), which is not imported here; a
test compares them."""
BUCKET = 500_000_000
"""Elements of the buffer in which ZeRO collects gradients, DeepSpeed's `reduce_bucket_size`."""
COPY = "the sampler's copy"
ESTIMATED = frozenset(
    ("activations", "logits", "one layer, or logits", "logits of a decoding step")
)
"""Names of the parts that follow from a rule of thumb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank's device, by what they hold, and for each stage of a step the names of the
    parts that it has in memory. `parameters` is how many the model has."""

    parameters: int
    parts: Mapping[str, int]
    stages: Mapping[str, tuple[str, ...]]

    @property
    def stage_totals(self) -> dict[str, int]:
        return {
            stage: sum(self.parts[part] for part in parts) for stage, parts in self.stages.items()
        }

    @property
    def largest_stage(self) -> str:
        totals = self.stage_totals
        return max(totals, key=lambda stage: totals[stage])

    @property
    def total(self) -> int:
        return self.stage_totals[self.largest_stage]


def estimate_step_memory(
    setup: "PhaseSetup", shape: ModelShape, tokens: TokenBudget
) -> MemoryEstimate:
    """Estimates the peak memory of one rank, by stage of a step, with all turns at their limit.

    The sampler's cache is freed before an update, during which vLLM on a shared GPU sleeps. The
    optimizer's step needs less than the update before it.
    """
    spec, needs = setup.spec, setup.needs
    runner, lora = spec.runner, getattr(spec.model, "lora", None)
    learned = shape.count_learned(lora)
    held = _compute_engine_bytes(runner, shape.parameters, learned)
    if "values" in needs:
        critic = _compute_engine_bytes(runner, shape.parameters, shape.parameters)
        held["critic, with gradients and moments"] = sum(critic.values())
        learned = shape.parameters
    if "reference_logprobs" in needs and (
        size := count_reference_parameters(spec, shape.parameters)
    ):
        held["reference policy"] = _share_of(runner, get_width(runner) * size, since=3)
    sampling = compute_sampler_bytes(spec, shape, tokens.levels)
    below = int(tokens.shared[1]) - tokens.common
    count = min(runner.micro_batch_tokens, tokens.common + -(-below // runner.ranks))
    targets = int(count * min(1.0, tokens.sampled[1] / tokens.shared[1]))
    update = estimate_update_bytes(runner, shape, count, targets, learns_head=lora is None)
    if runner.zero_stage:  # stage 1 keeps those of a micro-batch, which others send by buckets
        most = learned if runner.zero_stage == 1 else min(BUCKET, learned)
        update["gradients on their way"] = get_width(runner) * most
    kept = (*held, *(() if spec.sampler.holds_weights_apart else (COPY,)))
    return MemoryEstimate(
        parameters=shape.parameters,
        parts=held | sampling | update,
        stages={"sampling": (*held, *sampling), "update": (*kept, *update)},
    )


def get_width(runner: RunnerSpec) -> int:
    return 2 if runner.dtype == "bfloat16" else 4


def _share_of(runner: RunnerSpec, count: int, *, since: int) -> int:
    """Bytes of one rank, if ZeRO shards them from stage `since` on."""
    return count // (runner.ranks if runner.zero_stage >= since else 1)


def count_reference_parameters(spec: ExperimentSpec, own: int) -> int:
    """Parameters that the reference policy holds besides those of the policy; 0 for a model without
    its adapters. A reference whose dimensions are unknown here counts as large as the policy."""
    if spec.model.reference is not None:
        shape = load_model_shape(spec.model.reference)
        return own if shape is None else shape.parameters
    return own if getattr(spec.model, "lora", None) is None else 0


def _compute_engine_bytes(runner: RunnerSpec, parameters: int, learned: int) -> dict[str, int]:
    """Bytes that DeepSpeed holds on the device for one module; an offloaded optimizer's are not."""
    width = get_width(runner)
    weights = {"weights": _share_of(runner, width * parameters, since=3)}
    if runner.offload_optimizer:
        return weights
    has_copy = runner.zero_stage > 0 or width == 2
    return weights | {
        "gradients": _share_of(runner, (4 if runner.zero_stage else width) * learned, since=2),
        "Adam's moments": _share_of(runner, 8 * learned, since=1),
        "float32 copy": _share_of(runner, 4 * learned * has_copy, since=1),
    }


def estimate_update_bytes(
    runner: RunnerSpec, shape: ModelShape, tokens: int, targets: int, *, learns_head: bool = True
) -> dict[str, int]:
    """Bytes of the largest micro-batch of an update, beyond weights and gradients.

    What a layer of a Llama-style decoder keeps for its backward pass, per token: the float32
    inputs of both norms, their outputs before and after the norm's weight, queries, keys, values
    and outputs of attention, and four tensors of the MLP. With recomputation, a layer keeps its
    input only, and one layer at a time is whole.

    Args:
        tokens: packed tokens of the micro-batch.
        targets: tokens whose log-probabilities are wanted.
        learns_head: whether the output layer has a gradient.
    """
    width = get_width(runner)
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Flex attention wants as many heads of keys as of queries, or a power of two.
    keys = narrow if shape.heads & (shape.heads - 1) == 0 else wide
    norms = 2 * (4 + 2 * width) * shape.hidden
    attention = width * (2 * wide + 2 * keys) + 4 * shape.heads
    layer = norms + attention + 4 * width * shape.intermediate
    head = learns_head * width * shape.vocabulary * shape.hidden
    logits = head + targets * min(CHUNK, shape.vocabulary) * 20
    if runner.micro_batch_tokens * shape.vocabulary * 4 <= WHOLE_LOGITS or runner.zero_stage == 3:
        # In the model's precision, then in float32 scaled, as log-probabilities, and in between.
        logits = head + targets * shape.vocabulary * (width + 14)
    if not runner.activation_checkpointing:
        return {"activations": tokens * shape.layers * layer, "logits": logits}
    inputs = tokens * shape.layers * width * shape.hidden
    whole = tokens * (layer + 3 * width * shape.intermediate)  # with the gradients of its MLP
    whole += shape.tied * head  # waits for the gradient of the embeddings
    return {"activations": inputs, "one layer, or logits": max(whole, logits)}


COPIES = 2
"""Copies of a batch's keys and values while a quarter of its rows is set aside for a later turn."""


def compute_sampler_bytes(
    spec: ExperimentSpec, shape: ModelShape, levels: Sequence[LevelTokens]
) -> dict[str, int]:
    """Bytes that sampling holds: weights, keys and values of the rows that are decoded together at
    maximum length, and their logits. vLLM works within the memory that it is given."""
    sampler, on_host = spec.sampler, spec.runner.device != "cuda"
    width = get_width(spec.runner)
    weights = width * shape.parameters
    parts = {COPY: weights}
    if sampler.holds_weights_apart and not on_host:
        return parts  # the cache takes what else the engine is given
    if sampler.holds_weights_apart:
        parts["weights on their way to the sampler"] = weights
    if sampler.cache_bytes is not None:
        return parts | {"the sampler's cache": sampler.cache_bytes}
    rows = min(sampler.max_rows, -(-max(level.turns for level in levels) // spec.runner.ranks))
    each = shape.layers * 2 * shape.kv_heads * shape.head_dim * width
    cached = count_cached_tokens(levels, spec.runner.ranks, sampler.max_rows)
    return parts | {
        "the sampler's cache": int(cached) * each,
        # In float32: scaled, as log-probabilities, and for drawing.
        "logits of a decoding step": 3 * 4 * rows * shape.vocabulary,
    }


def count_cached_tokens(levels: Sequence[LevelTokens], ranks: int, max_rows: int) -> float:
    """Tokens whose keys and values one rank's sampler holds at most, with turns at their limit.

    Whole prompts, up to `max_rows` dialogues, go through all turns together; of the last turns as
    many are decoded at a time, and then freed.
    """
    dialogues = max(1, *(level.turns for level in levels[:-1] or levels))
    together = max(max_rows, levels[0].turns / levels[0].openings)  # those of a prompt, at least
    scale = min(1 / ranks, together / dialogues)
    rows, own, shared, peak = scale * levels[0].turns, 0.0, 0.0, 0.0
    for level in levels:
        if level.turns > level.openings:  # what several rows continue is kept once
            copied = scale * level.openings * (own + level.opening)
            if level is not levels[0]:  # kept caches, and their copies with another layout
                part = min(1.0, together / (scale * level.turns))
                forked = 1.5 * copied + scale * level.turns * level.at_most
                peak = max(peak, shared + rows * own + part * forked)
            shared += copied
            rows, own = scale * level.turns, 0.0
        else:
            own += level.opening
        own += level.at_most
        peak = max(peak, shared + COPIES * min(rows, together) * own)
    return peak


# What fits a GPU ---------------------------------------------------------------------------------
USABLE_GIB = {"24 GB": 22, "48 GB": 44, "80 GB": 78, "141 GB": 139}
"""GiB that torch finds on a GPU, by the size in its name; an H200 has 141 GB."""
ROOM, ROOM_WITH_VLLM = 0.92, 0.95
"""What a plan may fill of them: fragments, the driver and NCCL need some too. vLLM keeps to its
share."""


def compute_gpu_shares(
    runner: RunnerSpec, sampler: SamplerSpec, memory: MemoryEstimate
) -> dict[str, float]:
    """The largest stage of a step as a share of what torch finds on a GPU, by the GPU's size; none
    on a CPU. vLLM on a rank's GPU takes the share that it is given."""
    if runner.device != "cuda":
        return {}
    shares = {}
    for size, gib in USABLE_GIB.items():
        usable, totals = gib << 30, memory.stage_totals
        if isinstance(sampler, VllmSamplerSpec):
            given = int(sampler.gpu_memory_utilization * usable)
            totals["sampling"] += given - memory.parts[COPY]
        shares[size] = max(totals.values()) / usable
    return shares


def get_usable_share(sampler: SamplerSpec) -> float:
    return ROOM_WITH_VLLM if isinstance(sampler, VllmSamplerSpec) else ROOM
