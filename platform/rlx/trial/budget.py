"""Tokens and memory of one training step: counted where possible, otherwise estimated."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import TYPE_CHECKING

from rlx.rollout import NO_PARENT, EnvironmentPlan
from rlx.spec import ExperimentSpec, RunnerSpec, VllmSamplerSpec
from rlx.trial.model_shape import ModelShape
from rlx.trial.sampler_memory import compute_pool_bytes, compute_sampler_bytes, get_width
from rlx.trial.token_counts import LevelTokens, TokenBudget

if TYPE_CHECKING:  # they import torch, and memory is estimated without a trial too
    from rlx.recipe import Recipe
    from rlx.trial.synthetic_rollouts import PlanTrial

__all__ = [
    "SENT",
    "MemoryEstimate",
    "estimate_finish_bytes",
    "estimate_step_memory",
    "estimate_update_bytes",
    "token_budget",
]

WHOLE_LOGITS, CHUNK = 2 << 30, 8192
"""As in the learner (`rlx.learner.choice`, `rlx.learner.vocabulary`), which is not imported here; a
test compares them."""


# Tokens ------------------------------------------------------------------------------------------


def token_budget(trial: "PlanTrial") -> TokenBudget:
    """Counts the tokens of a step, with turns of synthetic length and with turns at their limit.

    Observations have the length that they have in the synthetic rollouts.
    """
    recipe, talk = trial.recipe, trial.recipe.plan.talk
    if talk is None:
        return _add_untrained_tokens(_sum_level_tokens(tuple(_count_level_tokens(trial))), recipe)
    levels = tuple(_count_dialogue_tokens(trial, talk))
    return _add_untrained_tokens(
        _sum_dialogue_tokens(levels, levels[0].openings * talk.count * talk.players), recipe
    )


def _count_level_tokens(trial: "PlanTrial") -> Iterator[LevelTokens]:
    above = trial.recipe.spec.rollout.prompts_per_step
    for number, level in enumerate(trial.recipe.plan.levels, start=1):
        openings, turns = _list_turn_lengths(trial, number)
        yield LevelTokens(
            kind=level.kind,
            turns=above * level.count,
            openings=above,
            opening=mean(openings),
            made_up=mean(turns),
            at_most=level.turn.max_new_tokens,
        )
        above *= level.count


def _count_dialogue_tokens(trial: "PlanTrial", talk: EnvironmentPlan) -> Iterator[LevelTokens]:
    """Yields the turns of a rollout, first to last."""
    prompts = trial.recipe.spec.rollout.prompts_per_step
    observations = [n for k in range(2, talk.last + 1) for n in _list_turn_lengths(trial, k)[0]]
    sampled = len(_list_turn_lengths(trial, 1)[1])
    for number in range(1, talk.last + 1):
        openings, turns = _list_turn_lengths(trial, number)
        if number == 1:
            openings = [len(tree.segments[0].token_ids) for tree in trial.trees]
        rollouts = round(prompts * talk.count * talk.players * len(turns) / max(1, sampled))
        yield LevelTokens(
            kind=f"turn {number}" if number <= talk.max_turns else "forced answer",
            turns=rollouts,
            openings=prompts if number == 1 else rollouts,
            opening=_compute_mean_length(openings or observations),
            made_up=_compute_mean_length(turns),
            at_most=talk.sampling(number).max_new_tokens,
        )


def _list_turn_lengths(trial: "PlanTrial", number: int) -> tuple[list[int], list[int]]:
    """Token counts of the openings and of the synthetic turns with this turn number."""
    pairs = [
        (len(tree.segments[s.parent].token_ids), len(s.token_ids))
        for tree in trial.trees
        for s in tree.segments
        if s.turn == number and s.parent != NO_PARENT
    ]
    return [opening for opening, _ in pairs], [turn for _, turn in pairs]


def _compute_mean_length(lengths: Sequence[int]) -> float:
    """Mean length; 0 for an empty sequence."""
    return mean(lengths) if lengths else 0.0


def _add_untrained_tokens(budget: TokenBudget, recipe: "Recipe") -> TokenBudget:
    """Adds tokens that are sampled but not trained on: greedy answers and resampled trees."""
    made_up, at_most = budget.sampled
    if "greedy_scores" in recipe.needs:
        first = budget.levels[0]
        made_up += first.openings * first.made_up
        at_most += first.openings * first.at_most
    again = recipe.spec.rollout.dynamic_sampling
    return replace(budget, sampled=(made_up, at_most * (again.max_batches if again else 1)))


def _sum_level_tokens(levels: tuple[LevelTokens, ...]) -> TokenBudget:
    sampled, rows, shared = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for which in (0, 1):
        context = 0.0
        for level in levels:
            length = (level.made_up, level.at_most)[which]
            context += level.opening + length
            sampled[which] += level.turns * length
            rows[which] += level.turns * context
            shared[which] += level.openings * level.opening + level.turns * length
    pairs = {"sampled": sampled, "rows": rows, "shared": shared}
    return TokenBudget(levels=levels, **{name: (a, b) for name, (a, b) in pairs.items()})


def _sum_dialogue_tokens(levels: tuple[LevelTokens, ...], rollouts: int) -> TokenBudget:
    """Tokens of rollouts that are one row each. The upper bound gives every rollout all turns."""
    first, *later = levels
    made_up = sum(level.turns * level.made_up for level in levels)
    seen = sum(level.turns * level.opening for level in later)
    longest = sum(level.at_most for level in levels)
    openings = sum(level.opening for level in later)
    each, once = rollouts * first.opening, first.openings * first.opening
    written, most = made_up + seen, rollouts * (longest + openings)
    return TokenBudget(
        levels=levels,
        sampled=(made_up, rollouts * longest),
        rows=(each + written, each + most),
        shared=(once + written, once + most),
    )


# Memory ------------------------------------------------------------------------------------------

BUCKET = 500_000_000
"""Elements of the buffer in which ZeRO collects gradients, DeepSpeed's `reduce_bucket_size`."""
SENT = "the weights that vLLM was sent"
"""A copy that a rank keeps on its device, unless it sends a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank's device.

    Attributes:
        parameters: parameters of the model; `learned` of them receive gradients.
        parts: bytes by what they hold.
        stages: for each stage of a step, the names of the parts that it has in memory.
        estimated: names of the parts that follow from a rule of thumb.
        pool: bytes on each device of a sampler's pool, which no rank computes on; empty without
            one. On a GPU its cache takes what else vLLM is given.
    """

    parameters: int
    learned: int
    parts: Mapping[str, int]
    stages: Mapping[str, tuple[str, ...]]
    estimated: tuple[str, ...] = (
        *("activations", "logits", "one layer, or logits", "logits of a decoding step"),
    )
    pool: Mapping[str, int] = field(default_factory=dict)

    @property
    def stage_totals(self) -> dict[str, int]:
        """Bytes at the peak of every stage."""
        return {
            stage: sum(self.parts[part] for part in parts) for stage, parts in self.stages.items()
        }

    @property
    def largest_stage(self) -> str:
        """The stage that needs most."""
        totals = self.stage_totals
        return max(totals, key=lambda stage: totals[stage])

    @property
    def total(self) -> int:
        """Bytes that the largest stage needs."""
        return self.stage_totals[self.largest_stage]


def estimate_step_memory(
    trial: "PlanTrial", shape: ModelShape, tokens: TokenBudget
) -> MemoryEstimate:
    """Estimates the peak memory of one rank, by stage of a step, with all turns at their limit.

    ZeRO shards Adam's moments and the float32 copy from stage 1 on, gradients from stage 2, weights
    from stage 3. Offloaded optimizer state is in host memory. The sampler's cache is freed before
    an update, during which vLLM on a shared GPU sleeps.
    """
    spec, needs = trial.recipe.spec, trial.recipe.needs
    runner, lora = spec.runner, getattr(spec.model, "lora", None)
    learned = shape.parameters if lora is None else shape.adapters(lora)
    largest = shape.parameters if "values" in needs else learned
    held = _compute_held_bytes(spec, shape, needs)
    sampling = compute_sampler_bytes(spec, shape, tokens.levels)
    count = min(runner.micro_batch_tokens, -(-int(tokens.shared[1]) // runner.ranks))
    targets = int(count * min(1.0, tokens.sampled[1] / tokens.shared[1]))
    update = estimate_update_bytes(runner, shape, count, targets, learns_head=lora is None)
    if runner.zero_stage:
        update["gradients on their way"] = _count_passing_bytes(runner, largest)
    finish = estimate_finish_bytes(runner, shape, largest)
    kept = (*held, *(() if spec.sampler.holds_weights_apart else ("the sampler's copy",)))
    return MemoryEstimate(
        parameters=shape.parameters,
        learned=learned,
        parts=held | sampling | update | finish,
        stages={
            "sampling": (*held, *sampling),
            "update": (*kept, *update),
            "optimizer step": (*kept, *finish),
        },
        pool=compute_pool_bytes(spec, shape),
    )


def estimate_update_bytes(
    runner: RunnerSpec, shape: ModelShape, tokens: int, targets: int, *, learns_head: bool = True
) -> dict[str, int]:
    """Bytes of the largest micro-batch of an update, beyond weights and gradients.

    What a layer of a Llama-style decoder keeps for its backward pass, per token: the float32
    inputs of both norms, their outputs before and after the norm's weight, queries, keys, values
    and outputs of attention, and four tensors of the MLP. Flex attention keeps just that
    and a number for each head; masks of grouped attention are not counted. With recomputation, a
    layer keeps its input only, and one layer at a time is whole.

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
    logits = _estimate_logit_bytes(runner, shape, targets, width) + head
    if not runner.activation_checkpointing:
        return {"activations": tokens * shape.layers * layer, "logits": logits}
    inputs = tokens * shape.layers * width * shape.hidden
    whole = tokens * (layer + 3 * width * shape.intermediate)  # with the gradients of its MLP
    whole += shape.tied * head  # waits for the gradient of the embeddings
    return {"activations": inputs, "one layer, or logits": max(whole, logits)}


def _count_passing_bytes(runner: RunnerSpec, learned: int) -> int:
    """Bytes of gradients in the precision of the backward pass, before they are added up."""
    if _keeps_own_gradients(runner):
        return get_width(runner) * learned
    return min(BUCKET, learned) * (get_width(runner) if runner.zero_stage > 1 else 4)


def estimate_finish_bytes(runner: RunnerSpec, shape: ModelShape, learned: int) -> dict[str, int]:
    """Bytes that an optimizer step takes beyond weights, gradients and the optimizer's state.

    DeepSpeed 0.19.8 computes the norm of one gradient after the other in float64
    (`stage_1_and_2.py`, `get_grad_norm_direct`). Under stage 2, the gradients of a model in
    bfloat16 are added up where the optimizer reads them (`_get_preflattened_grad_partition`); in
    float32, and under stage 3, they are copied in a row.

    Args:
        learned: parameters of the larger engine that receive gradients.
    """
    if not runner.zero_stage or runner.offload_optimizer:
        return {}
    if _keeps_own_gradients(runner):
        return {"gradients of the last micro-batch": get_width(runner) * learned}
    share = _share_of(runner, learned, since=1)
    if runner.zero_stage == 2 and runner.dtype == "bfloat16":
        return {"a gradient in float64": 8 * min(shape.largest, share)}
    return {"gradients in a row": 4 * share}


def _keeps_own_gradients(runner: RunnerSpec) -> bool:
    """Whether all gradients of a micro-batch stay until the next one, or the end of the step.

    Stage 1 in bfloat16 is DeepSpeed's `BF16_Optimizer`, which sets them to zero in their place.
    """
    return runner.zero_stage == 1 and runner.dtype == "bfloat16" and not runner.offload_optimizer


def _estimate_logit_bytes(runner: RunnerSpec, shape: ModelShape, targets: int, width: int) -> int:
    """Bytes of the logits of the targets and of what is computed from them."""
    if runner.micro_batch_tokens * shape.vocabulary * 4 <= WHOLE_LOGITS or runner.zero_stage == 3:
        # In the model's precision, then in float32 scaled, as log-probabilities, and in between.
        return targets * shape.vocabulary * (width + 14)
    return targets * min(CHUNK, shape.vocabulary) * 20


def _share_of(runner: RunnerSpec, count: int, *, since: int) -> int:
    """Bytes of one rank, if ZeRO shards them from stage `since` on."""
    return count // (runner.ranks if runner.zero_stage >= since else 1)


def _compute_held_bytes(
    spec: ExperimentSpec, shape: ModelShape, needs: Collection[str]
) -> dict[str, int]:
    """Bytes that are on the device in every stage: learner, critic, reference policy, and what a
    worker of vLLM that is started again would be sent."""
    width, lora = get_width(spec.runner), getattr(spec.model, "lora", None)
    learned = shape.parameters if lora is None else shape.adapters(lora)
    held = _compute_engine_bytes(spec, shape.parameters, learned, width)
    if "values" in needs:
        engine = _compute_engine_bytes(spec, shape.parameters, shape.parameters, width)
        held["critic, with gradients and moments"] = sum(engine.values())
    if "reference_logprobs" in needs and lora is None:
        held["reference policy"] = _share_of(spec.runner, width * shape.parameters, since=3)
    if isinstance(spec.sampler, VllmSamplerSpec) and spec.sampler.weight_transfer != "file":
        held[SENT] = width * shape.parameters
    return held


def _compute_engine_bytes(
    spec: ExperimentSpec, parameters: int, learned: int, width: int
) -> dict[str, int]:
    """Bytes that DeepSpeed holds on the device for one module."""
    runner = spec.runner
    weights = {"weights": _share_of(runner, width * parameters, since=3)}
    if runner.offload_optimizer:
        return weights
    has_copy = runner.zero_stage > 0 or width == 2
    return weights | {
        "gradients": _share_of(runner, (4 if runner.zero_stage else width) * learned, since=2),
        "Adam's moments": _share_of(runner, 8 * learned, since=1),
        "float32 copy": _share_of(runner, 4 * learned * has_copy, since=1),
    }
