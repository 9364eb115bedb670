"""Weights that servers of a pool take while they generate: which version sampled which token."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import torch
from babblers import babbler
from engines import needs_vllm

from rlx.rollout import CompletionRequest
from rlx.sampler import PoolSampler
from rlx.spec import RunnerSpec, TurnSpec, VllmSamplerSpec

pytestmark = [needs_vllm]

CPU = torch.device("cpu")
LONG = TurnSpec(max_new_tokens=120)
TOLERANCE = 5e-5
"""Nats between vLLM and a model of ours in float32, as in tests/system/test_vllm_pool.py."""


@contextmanager
def opened(policy, **settings):
    spec = VllmSamplerSpec(engine="vllm", kv_cache_mb=64, pool={"servers": 1}, **settings)
    sampler = PoolSampler(policy, spec, RunnerSpec(), CPU)
    try:
        yield sampler
    finally:
        sampler.close()


def name_and_load(sampler, step, policy):
    sampler.name_weights(step)
    sampler.load(dict(policy.model.named_parameters()))


def logprobs(policy, context, tokens):
    """What a policy gives each token, in nats."""
    ids = torch.tensor([[*context, *tokens]])
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[0, len(context) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(context) :, None])[:, 0]


def sample_beside(sampler, requests, meanwhile):
    """Samples in a thread, and does something as soon as its rows are being generated."""
    answers = []

    def sample():
        with sampler.session() as session:
            answers.append(session.generate(requests, LONG))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        meanwhile(thread)
    finally:
        thread.join()
    (completions,) = answers
    return [(r.context, c) for r, group in zip(requests, completions, strict=True) for c in group]


def test_each_token_has_the_probability_that_the_weights_give_it_which_it_names():
    """Rows whose cache is computed again for new weights are drawn from these alone."""
    policies = [replace(babbler(number), end_ids=(0,)) for number in range(3)]
    requests = [CompletionRequest((1 + n, 2, 3), None, (n, n + 50)) for n in range(6)]
    with opened(policies[0]) as sampler:
        sampler.tell_ages()
        name_and_load(sampler, 0, policies[0])

        def hand_over(thread):
            for step in count(1):
                if not thread.is_alive():
                    return
                name_and_load(sampler, step, policies[step % 3])
                time.sleep(0.1)  # scenario: rows go on

        rows = sample_beside(sampler, requests, hand_over)
    for context, completion in rows:
        runs = completion.sampled_after
        assert sum(length for length, _ in runs) == len(completion.token_ids)
        steps = [step for _, step in runs]
        assert steps == sorted(set(steps))
        start = 0
        for length, step in runs:
            here = slice(start, start + length)
            ours = logprobs(policies[step % 3], context, completion.token_ids)[here]
            assert (ours - torch.tensor(completion.logprobs[here])).abs().max() < TOLERANCE
            start += length
    assert any(len(completion.sampled_after) > 1 for _, completion in rows)
