"""Tokens and memory of one training step: counted where possible, otherwise estimated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from rlx.recipe import Recipe
from rlx.rollout import NO_PARENT, EnvironmentPlan
from rlx.spec import ExperimentSpec
from rlx.trial.model_shape import ModelShape
from rlx.trial.synthetic_rollouts import PlanTrial

__all__ = ["LevelTokens", "MemoryEstimate", "TokenBudget", "estimate_memory", "token_budget"]


# Tokens ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTokens:
    """Tokens of one turn level in a step; with an environment, of one turn number.

    Attributes:
        kind: kind of turn.
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
        levels: turn levels, first turn first.
        sampled: tokens that the policy samples.
        rows: tokens the learner would process if every row repeated its own context.
        shared: tokens the learner processes, with each shared prefix counted once.
    """

    levels: tuple[LevelTokens, ...]
    sampled: tuple[float, float]
    rows: tuple[float, float]
    shared: tuple[float, float]

    @property
    def longest(self) -> float:
        """Tokens of a dialogue with turns at their limit and openings of synthetic length."""
        return sum(level.opening + level.at_most for level in self.levels)


def token_budget(trial: PlanTrial) -> TokenBudget:
    """Counts the tokens of a step, with turns of synthetic length and with turns at their limit.

    Observations have the length that they have in the synthetic rollouts.
    """
    recipe, talk = trial.recipe, trial.recipe.plan.talk
    if talk is None:
        return _add_untrained_tokens(_sum_level_tokens(tuple(_count_level_tokens(trial))), recipe)
    levels = tuple(_count_dialogue_tokens(trial, talk))
    return _add_untrained_tokens(
        _sum_dialogue_tokens(levels, levels[0].openings * talk.count), recipe
    )


def _count_level_tokens(trial: PlanTrial) -> Iterator[LevelTokens]:
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


def _count_dialogue_tokens(trial: PlanTrial, talk: EnvironmentPlan) -> Iterator[LevelTokens]:
    """Yields the turns of a rollout, first to last."""
    prompts = trial.recipe.spec.rollout.prompts_per_step
    observations = [n for k in range(2, talk.last + 1) for n in _list_turn_lengths(trial, k)[0]]
    sampled = len(_list_turn_lengths(trial, 1)[1])
    for number in range(1, talk.last + 1):
        openings, turns = _list_turn_lengths(trial, number)
        if number == 1:
            openings = [len(tree.segments[0].token_ids) for tree in trial.trees]
        rollouts = round(prompts * talk.count * len(turns) / max(1, sampled))
        yield LevelTokens(
            kind=f"turn {number}" if number <= talk.max_turns else "forced answer",
            turns=rollouts,
            openings=prompts if number == 1 else rollouts,
            opening=_compute_mean_length(openings or observations),
            made_up=_compute_mean_length(turns),
            at_most=talk.sampling(number).max_new_tokens,
        )


def _list_turn_lengths(trial: PlanTrial, number: int) -> tuple[list[int], list[int]]:
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


def _add_untrained_tokens(budget: TokenBudget, recipe: Recipe) -> TokenBudget:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank.

    Attributes:
        parameters: parameters of the model; `learned` of them receive gradients.
        parts: bytes by what they hold.
        estimated: names of the parts that follow from a rule of thumb.
    """

    parameters: int
    learned: int
    parts: Mapping[str, int]
    estimated: tuple[str, ...] = ("activations", "logits")

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.parts.values())


def estimate_memory(trial: PlanTrial, shape: ModelShape, tokens: TokenBudget) -> MemoryEstimate:
    """Estimates the peak memory of one rank, with the sampler's KV cache at its longest.

    ZeRO shards Adam's moments and the float32 copy from stage 1 on, gradients from stage 2, weights
    from stage 3. Activations are those of one micro-batch without recomputation.
    """
    spec = trial.recipe.spec
    runner, lora = spec.runner, getattr(spec.model, "lora", None)
    width = 2 if runner.dtype == "bfloat16" else 4
    learned = shape.parameters if lora is None else shape.adapters(lora)
    parts = _compute_engine_bytes(spec, shape.parameters, learned, width)
    step = -(-int(tokens.shared[1]) // runner.ranks)
    parts |= _compute_activation_bytes(trial, shape, width, min(runner.micro_batch_tokens, step))
    parts["the sampler's copy"] = width * shape.parameters
    if spec.sampler.holds_weights_apart:
        parts["weights on their way to the sampler"] = width * shape.parameters
    parts["the sampler's cache"] = _compute_cache_bytes(spec, shape, tokens, width)
    if "values" in trial.recipe.needs:
        engine = _compute_engine_bytes(spec, shape.parameters, shape.parameters, width)
        parts["critic, with gradients and moments"] = sum(engine.values())
    if "reference_logprobs" in trial.recipe.needs and lora is None:
        parts["reference policy"] = width * shape.parameters
    return MemoryEstimate(parameters=shape.parameters, learned=learned, parts=parts)


def _compute_engine_bytes(
    spec: ExperimentSpec, parameters: int, learned: int, width: int
) -> dict[str, int]:
    """Bytes that DeepSpeed holds for one module."""
    ranks, stage = spec.runner.ranks, spec.runner.zero_stage
    has_copy = stage > 0 or width == 2
    return {
        "weights": width * parameters // (ranks if stage == 3 else 1),
        "gradients": (4 if stage else width) * learned // (ranks if stage >= 2 else 1),
        "Adam's moments": 8 * learned // (ranks if stage else 1),
        "float32 copy": 4 * learned * has_copy // (ranks if stage else 1),
    }


def _compute_activation_bytes(
    trial: PlanTrial, shape: ModelShape, width: int, tokens: int
) -> dict[str, int]:
    """Rule of thumb for one micro-batch: the activations that each layer's backward pass reads."""
    layer = 6 * shape.hidden + 4 * shape.intermediate
    layer += 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    share = 1.0
    if trial.train is not None:
        share = float(trial.train.mask.sum() / trial.train.batch.is_token.sum())
    # Logits in the model's precision, their float32 copy, its log-softmax and its gradient.
    logits = int(share * tokens) * shape.vocabulary * (width + 12)
    return {"activations": tokens * shape.layers * layer * width, "logits": logits}


def _compute_cache_bytes(
    spec: ExperimentSpec, shape: ModelShape, tokens: TokenBudget, width: int
) -> int:
    """Keys and values of the rows that are decoded together, all at maximum length.

    An engine such as vLLM works within the memory that it is given.
    """
    if spec.sampler.cache_bytes is not None:
        return spec.sampler.cache_bytes
    most = max(level.turns for level in tokens.levels)
    rows = min(spec.sampler.max_rows, -(-most // spec.runner.ranks))
    length = min(tokens.longest, shape.positions or tokens.longest)
    return int(rows * length) * shape.layers * 2 * shape.kv_heads * shape.head_dim * width
