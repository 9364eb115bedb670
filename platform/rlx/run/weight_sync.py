"""The learner's weights for the sampler, and whether they have arrived.

An engine that is not the learner's own implementation keeps things that are made from weights:
packed matrices, tied embeddings, keys and values of prompts. One that stays behind gives tokens of
another policy, with log-probabilities that look sound. So the same few prompts are sampled before
and after each synchronisation, and the learner is asked for the same log-probabilities.
"""

import random
from collections.abc import Sequence

from rlx.batch import build_token_batch
from rlx.errors import RlxError
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, Completion, CompletionRequest, RolloutTree, Segment
from rlx.run.run_context import RunContext
from rlx.sampler import SamplingEngine, VllmSampler
from rlx.seeding import derive_seed
from rlx.spec import TurnSpec
from rlx.spec import VllmSamplerSpec as VllmSpec

__all__ = ["compute_sync_figures", "synchronize_sampler"]

PROMPTS = 4
LENGTH = 72
"""Tokens of a prompt: more than two blocks of vLLM's prefix cache."""
SAID = TurnSpec(max_new_tokens=8)
SEEDS = ((0, 1), (2, 3))
"""Of the two rounds: the second finds the prompts in the prefix cache."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


def synchronize_sampler(context: RunContext) -> None:
    """Gives the sampler the learner's weights; every rank calls it.

    Raises:
        RlxError: the sampler does not take them, or its log-probabilities are not the learner's.
    """
    spec = context.spec.sampler
    if not isinstance(spec, VllmSpec) or not isinstance(context.sampler, VllmSampler):
        context.sampler.load(context.learner.weights())
        return
    prompts = _build_check_prompts(context, context.sampler.context_length)
    _sample_completions(
        context.sampler, prompts, SEEDS[:1]
    )  # what is kept of them now would be found afterwards
    context.sampler.load(context.learner.weights())
    said = [
        one
        for share in context.ranks.gather(_sample_completions(context.sampler, prompts, SEEDS))
        for one in share
    ]
    context.sampler.drift = _compute_drift(context, said)
    tolerance = spec.tolerance or TOLERANCE[context.spec.runner.dtype]
    if not context.sampler.drift <= tolerance:  # NaN is not
        raise RlxError(
            f"vLLM's log-probabilities are up to {context.sampler.drift:.3g} nats off the "
            "learner's "
            f"after it took the learner's weights, and sampler.tolerance is {tolerance:g}: it "
            "samples from another policy than the one that learns. Something that it keeps of "
            "former weights was not renewed (tied embeddings, its prefix cache), or it computes "
            "this model in another way; sampler.engine: transformers does without vLLM"
        )


def compute_sync_figures(sampler: SamplingEngine) -> dict[str, float]:
    """What there is to record of the last synchronisation, and of the sampler's process."""
    if not isinstance(sampler, VllmSampler):
        return {}
    return {"sampler/drift": sampler.drift, "sampler/restarts": float(sampler.restarts)}


_Said = tuple[tuple[int, ...], Completion]


def _build_check_prompts(context: RunContext, longest: int) -> list[tuple[int, ...]]:
    """Always the same tokens, of which none ends a turn."""
    vocabulary = sorted({*range(len(context.policy.tokenizer))} - {*context.policy.end_ids})
    source = random.Random(derive_seed(0, "synchronising"))
    length = min(LENGTH, longest - SAID.max_new_tokens)
    if length < 1:
        raise RlxError(
            f"vLLM can hold {longest} tokens of a dialogue here: raise sampler.kv_cache_mb, or "
            "sampler.gpu_memory_utilization on a GPU"
        )
    return [tuple(source.choices(vocabulary, k=length)) for _ in range(PROMPTS)]


def _sample_completions(
    sampler: SamplingEngine, prompts: Sequence[tuple[int, ...]], rounds: Sequence[tuple[int, ...]]
) -> list[_Said]:
    """What is said to every prompt, round by round."""
    said: list[_Said] = []
    with sampler.session() as session:
        for seeds in rounds:
            requests = [CompletionRequest(prompt, None, seeds) for prompt in prompts]
            groups = session.generate(requests, SAID)
            said += [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    return said


def _compute_drift(context: RunContext, said: Sequence[_Said]) -> float:
    """The largest difference between log-probabilities of the sampler and the learner, in nats."""
    batch = build_token_batch(
        [_build_completion_tree(prompt, completion) for prompt, completion in said]
    )
    learned = context.learner.logprobs(batch, batch.is_own)
    return float((learned - batch.behaviour_logprobs).abs()[batch.is_own].max())


def _build_completion_tree(prompt: tuple[int, ...], completion: Completion) -> RolloutTree:
    said = Segment(
        parent=0,
        author="policy",
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        turn=1,
        kind="answer",
    )
    opening = Segment(parent=NO_PARENT, author="prompt", token_ids=prompt)
    return RolloutTree(Problem(id="synchronising", prompt="", fields={}), (opening, said))
