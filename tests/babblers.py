"""A small random model whose turns end soon, and second turns below its first ones."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from rlx.model import PlainDialogue, build_policy
from rlx.rollout import CompletionRequest
from rlx.spec import TinyModelSpec, TurnSpec

SPEC = TinyModelSpec(
    hidden_size=64, heads=2, kv_heads=1, layers=2, intermediate_size=64, initializer_range=0.15
)
ANSWER = TurnSpec(max_new_tokens=24)
CONFIDENCE = TurnSpec(max_new_tokens=8, temperature=0.7)


def babbler(seed):
    """A random model of which about one token in ten ends a turn."""
    policy = build_policy(SPEC, seed)
    ends = (policy.tokenizer.eos_token_id, *range(20, 33))
    return replace(policy, dialogue=PlainDialogue(policy.tokenizer, ends), end_ids=ends)


def furthest(policy, requests, completions, temperature=1.0):
    """The largest difference, in nats, from one plain forward over each whole sequence."""
    worst = 0.0
    for request, group in zip(requests, completions, strict=True):
        for c in group:
            with torch.no_grad():
                ids = torch.tensor([request.context + c.token_ids], device=policy.model.device)
                logits = policy.model(input_ids=ids).logits.cpu()
            logprobs = (logits[0] / temperature).log_softmax(dim=-1)[len(request.context) - 1 :]
            plain = logprobs[torch.arange(len(c.token_ids)), torch.tensor(c.token_ids)]
            worst = max(worst, float((plain - torch.tensor(c.logprobs)).abs().max()))
    return worst


def second_turns(policy, requests, completions):
    """One question below every completion, two seeds each; some answers were cut short."""
    pairs = [(r, c) for r, group in zip(requests, completions, strict=True) for c in group]
    return [
        CompletionRequest(
            r.context + c.token_ids + policy.dialogue.reply("sure?\n", c.token_ids),
            number,
            (1000 + 2 * number, 1001 + 2 * number),
        )
        for number, (r, c) in enumerate(pairs)
    ]


WAYS = (
    "compact decoder, shared ancestors",
    "compact decoder, shared ancestors, captured steps",
    "the model's own forward",
)
"""Ways in which a policy is sampled, as the sampler describes them."""


@contextmanager
def sampled(policy, way):
    """Has a policy sampled in one of the ways: on a CPU captured steps are taken without a graph.

    What no plain decoder has keeps the policy from the compact one.
    """
    if way == WAYS[2]:
        policy.model.model.unheard_of = torch.nn.Identity()
    with pytest.MonkeyPatch.context() as patched:
        kinds = {"cpu", "cuda"} if way == WAYS[1] else set()
        patched.setattr("rlx.sampler.decoders.CAPTURED", kinds)
        patched.setattr("rlx.sampler.gpu_steps.COLUMNS", 8)  # so that shapes end
        yield policy
