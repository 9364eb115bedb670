"""How many tokens and how much memory a step takes: counted where it can be, else estimated."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from rlx.plan.trial import Trial
from rlx.rollout import NO_PARENT
from rlx.run.parts import Parts
from rlx.spec import ExperimentSpec, Lora, ModelSpec, Tiny

__all__ = ["LevelTokens", "Memory", "Shape", "TokenBudget", "memory", "shape_of", "token_budget"]


# Tokens ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTokens:
    """One kind of turn in a step.

    Attributes:
        kind: of turn.
        turns: sampled per step.
        openings: prompts or questions that open them, per step.
        opening: tokens of one of those, on average.
        made_up: tokens of a made-up turn, on average.
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
    """Tokens of one step; pairs are (with the lengths made up, at most).

    Attributes:
        levels: from the first turn on.
        sampled: tokens that the policy writes.
        rows: what the learner would compute if every row carried its own context.
        shared: what it computes, each prefix once.
    """

    levels: tuple[LevelTokens, ...]
    sampled: tuple[float, float]
    rows: tuple[float, float]
    shared: tuple[float, float]


def token_budget(trial: Trial) -> TokenBudget:
    """The tokens of a step: with lengths as made up, and with turns as long as can be."""
    levels, above = [], trial.parts.spec.rollout.prompts_per_step
    for number, level in enumerate(trial.parts.plan.levels, start=1):
        segments = [s for tree in trial.trees for s in tree.segments]
        turns = [len(s.token_ids) for s in segments if s.turn == number]
        opening = [
            len(tree.segments[s.parent].token_ids)
            for tree in trial.trees
            for s in tree.segments
            if s.turn == number and s.parent != NO_PARENT
        ]
        levels.append(
            LevelTokens(
                kind=level.kind,
                turns=above * level.count,
                openings=above,
                opening=mean(opening),
                made_up=mean(turns),
                at_most=level.turn.max_new_tokens,
            )
        )
        above *= level.count
    return _drawn(_summed(tuple(levels)), trial.parts)


def _drawn(budget: TokenBudget, parts: Parts) -> TokenBudget:
    """With what is sampled and not trained on: greedy answers, and trees drawn again."""
    made_up, at_most = budget.sampled
    if parts.wants_greedy:
        first = budget.levels[0]
        made_up += first.openings * first.made_up
        at_most += first.openings * first.at_most
    again = parts.spec.rollout.dynamic_sampling
    return replace(budget, sampled=(made_up, at_most * (again.max_batches if again else 1)))


def _summed(levels: tuple[LevelTokens, ...]) -> TokenBudget:
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


# Memory ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of a decoder of the Llama kind.

    Attributes:
        tied: the output embedding is the input's.
        small: a layer's biases, and norms within its heads.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool
    small: int = 0

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of a layer's matrices."""
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
        """Weights of embeddings, matrices, norms and biases."""
        layer = sum(a * b for a, b in self.linears.values()) + 2 * self.hidden + self.small
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    def adapters(self, lora: Lora) -> int:
        """Weights of low-rank adapters."""
        every = "all-linear" in lora.targets
        chosen = [d for name, d in self.linears.items() if every or name in lora.targets]
        return self.layers * sum(lora.rank * (a + b) for a, b in chosen)


def shape_of(spec: ModelSpec) -> Shape | None:
    """The model's dimensions; None where its configuration is not here, or of another kind."""
    from rlx.model.tokenizer import files_at_hand, tiny_tokenizer

    if isinstance(spec, Tiny):
        return Shape(
            vocabulary=len(tiny_tokenizer(spec)),
            hidden=spec.hidden_size,
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            tied=True,
            small=2 * spec.head_dim,
        )
    folder = files_at_hand(spec)
    if folder is None:
        return None
    try:
        return _configured(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _configured(config: Mapping[str, Any]) -> Shape:
    heads, kind = config["num_attention_heads"], config["model_type"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    small = {"qwen3": 2 * head_dim, "qwen2": (heads + 2 * kv_heads) * head_dim}
    return Shape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        small=small.get(kind, 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        parameters: of the model; `learned` of them get gradients.
        parts: bytes by what they hold.
        estimated: the parts that follow from a rule of thumb.
    """

    parameters: int
    learned: int
    parts: Mapping[str, int]
    estimated: tuple[str, ...] = ("activations", "logits")

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def memory(trial: Trial, shape: Shape, tokens: TokenBudget) -> Memory:
    """What one rank must hold at once, the sampler's cache at its longest.

    ZeRO shards Adam's moments and the float32 copy from stage 1 on, gradients from stage 2, weights
    from stage 3. Activations are those of one micro-batch without recomputation.
    """
    spec = trial.parts.spec
    runner, lora = spec.runner, getattr(spec.model, "lora", None)
    width = 2 if runner.dtype == "bfloat16" else 4
    learned = shape.parameters if lora is None else shape.adapters(lora)
    parts = _engine(spec, shape.parameters, learned, width)
    step = -(-int(tokens.shared[1]) // runner.ranks)
    parts |= _activations(trial, shape, width, min(runner.micro_batch_tokens, step))
    parts["the sampler's copy"] = width * shape.parameters
    parts["the sampler's cache"] = _cache(spec, shape, tokens, width)
    if trial.parts.wants_values:
        engine = _engine(spec, shape.parameters, shape.parameters, width)
        parts["critic, with gradients and moments"] = sum(engine.values())
    if trial.parts.wants_reference and lora is None:
        parts["reference policy"] = width * shape.parameters
    return Memory(parameters=shape.parameters, learned=learned, parts=parts)


def _engine(spec: ExperimentSpec, parameters: int, learned: int, width: int) -> dict[str, int]:
    """What DeepSpeed holds of one module."""
    ranks, stage = spec.runner.ranks, spec.runner.zero_stage
    has_copy = stage > 0 or width == 2
    return {
        "weights": width * parameters // (ranks if stage == 3 else 1),
        "gradients": (4 if stage else width) * learned // (ranks if stage >= 2 else 1),
        "Adam's moments": 8 * learned // (ranks if stage else 1),
        "float32 copy": 4 * learned * has_copy // (ranks if stage else 1),
    }


def _activations(trial: Trial, shape: Shape, width: int, tokens: int) -> dict[str, int]:
    """Of one micro-batch, as a rule of thumb: what the backward pass of each layer reads."""
    layer = 6 * shape.hidden + 4 * shape.intermediate
    layer += 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    share = 1.0
    if trial.train is not None:
        share = float(trial.train.mask.sum() / trial.train.batch.is_token.sum())
    # logits in the model's precision, their float32 copy, its log-softmax and gradient
    logits = int(share * tokens) * shape.vocabulary * (width + 12)
    return {"activations": tokens * shape.layers * layer * width, "logits": logits}


def _cache(spec: ExperimentSpec, shape: Shape, tokens: TokenBudget, width: int) -> int:
    """Keys and values of the rows that are decoded together, all as long as they can be."""
    last = tokens.levels[-1]
    rows = min(spec.sampler.max_rows, -(-last.turns // spec.runner.ranks))
    length = sum(level.opening + level.at_most for level in tokens.levels)
    return int(rows * length) * shape.layers * 2 * shape.kv_heads * shape.head_dim * width
