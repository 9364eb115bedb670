"""Loads the learner's weights into the sampler, and verifies that the sampler uses them.

An engine with its own model keeps state that is derived from the weights: packed matrices, tied
embeddings, cached keys and values of prompts. If such state is stale, it samples from another
policy, with plausible log-probabilities. The same few prompts are therefore sampled before and
after each synchronisation, and their log-probabilities are compared with the learner's.
"""

import random
from collections.abc import Sequence

from rlx.batch import build_token_batch
from rlx.errors import RlxError
from rlx.kl import kl_terms
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, Completion, CompletionRequest, RolloutTree, Segment
from rlx.run.context import RunContext
from rlx.sampler import SamplerDrift, SamplingEngine
from rlx.seeding import derive_seed
from rlx.spec import TurnSpec

PROMPTS = 4
"""Prompts that are sampled."""
LENGTH = 72
"""Tokens per prompt: more than two blocks of vLLM's prefix cache."""
CHECK_TURN = TurnSpec(max_new_tokens=8)
SEEDS = ((0, 1), (2, 3))
"""Seeds of the two rounds; the second round finds the prompts in the prefix cache."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |Δ| in nats. Correct bfloat16 engines differ by a σ of about .05 a token, thus .04 in the
mean of |Δ| (TRL issue 6789)."""


def synchronize_sampler(context: RunContext) -> None:
    """Loads the learner's weights, adapters merged, into the sampler; every rank calls it.

    Raises:
        RlxError: the sampler rejects the weights, or its log-probabilities are not the learner's.
    """
    spec = context.spec.sampler
    if not spec.own_model:
        context.sampler.load_each(context.learner.iterate_weights())
        return
    with context.sampler.session() as session:
        prompts = _build_check_prompts(context, session.context_length)
    # Fills the caches, so that entries which are stale after the load are found. An engine that
    # sleeps has dropped them, with its weights.
    if context.sampler.holds_weights:
        _sample_completions(context.sampler, prompts, SEEDS[:1])
    context.sampler.load_each(context.learner.iterate_weights())
    completions = [
        one
        for share in context.ranks.gather(_sample_completions(context.sampler, prompts, SEEDS))
        for one in share
    ]
    drift = context.sampler.drift = _compute_drift(context, completions)
    tolerance = spec.max_drift or TOLERANCE[context.spec.runner.dtype]
    if not drift.mean <= tolerance:  # NaN raises too
        raise RlxError(
            f"after a weight update, the log-probabilities of the engine {spec.engine!r} differ "
            f"from the learner's by {drift.mean:.3g} nats in the mean and {drift.largest:.3g} at "
            f"most; the mean may be {tolerance:g} (sampler.tolerance of vLLM). The engine samples "
            "from a different policy than the one being trained: it still holds old weights (tied "
            "embeddings, prefix cache), or it computes this model differently. Set "
            "sampler.engine: transformers to sample by the learner's code"
        )


def compute_sync_figures(sampler: SamplingEngine) -> dict[str, float]:
    """Metrics of the last synchronisation and of the engine's process; empty for an engine without
    a model of its own."""
    if sampler.drift is None:
        return {}
    return {
        "sampler/drift": sampler.drift.largest,
        "sampler/drift_mean": sampler.drift.mean,
        "sampler/drift_k3": sampler.drift.k3,
        "sampler/restarts": float(sampler.restarts),
    }


_PromptCompletion = tuple[tuple[int, ...], Completion]


def _build_check_prompts(context: RunContext, longest: int) -> list[tuple[int, ...]]:
    """Builds the same prompts every time, without tokens that end a turn."""
    vocabulary = sorted({*range(len(context.policy.tokenizer))} - {*context.policy.end_ids})
    source = random.Random(derive_seed(0, "synchronising"))
    length = min(LENGTH, longest - CHECK_TURN.max_new_tokens)
    if length < 1:
        raise RlxError(
            f"the sampler has memory for a dialogue of only {longest} tokens: for vLLM, raise "
            "sampler.kv_cache_mb, or sampler.gpu_memory_utilization on a GPU"
        )
    return [tuple(source.choices(vocabulary, k=length)) for _ in range(PROMPTS)]


def _sample_completions(
    sampler: SamplingEngine, prompts: Sequence[tuple[int, ...]], rounds: Sequence[tuple[int, ...]]
) -> list[_PromptCompletion]:
    completions: list[_PromptCompletion] = []
    with sampler.session() as session:
        for seeds in rounds:
            requests = [CompletionRequest(prompt, None, seeds) for prompt in prompts]
            groups = session.generate(requests, CHECK_TURN)
            completions += [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    return completions


def _compute_drift(context: RunContext, completions: Sequence[_PromptCompletion]) -> SamplerDrift:
    batch = build_token_batch(
        [_build_completion_tree(prompt, completion) for prompt, completion in completions]
    )
    learned = context.learner.logprobs(batch, batch.is_own)[batch.is_own]
    sampled = batch.behaviour_logprobs[batch.is_own]
    difference = (learned - sampled).abs()
    return SamplerDrift(
        largest=float(difference.max()),
        mean=float(difference.mean()),
        k3=float(kl_terms(sampled, learned, "k3").mean()),
    )


def _build_completion_tree(prompt: tuple[int, ...], completion: Completion) -> RolloutTree:
    response = Segment(
        parent=0,
        author="policy",
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        turn=1,
        kind="answer",
    )
    opening = Segment(parent=NO_PARENT, author="prompt", token_ids=prompt)
    return RolloutTree(Problem(id="synchronising", prompt="", fields={}), (opening, response))
