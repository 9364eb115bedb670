"""The plan's tokens in the sampler's cache against the memory that sampling takes."""

from contextlib import contextmanager
from dataclasses import replace

import torch
from fake_memory import LiveBytes
from rows import each_row

from rlx.model import build_policy
from rlx.plan.memory import LevelTokens, count_cached_tokens
from rlx.rollout import CompletionRequest
from rlx.sampler import TransformersSampler
from rlx.spec import TinyModelSpec, TurnSpec

MODEL = TinyModelSpec(
    hidden_size=32, heads=8, kv_heads=8, head_dim=64, layers=4, intermediate_size=32
)
TOKEN = 4 * 2 * 8 * 64 * 4
"""Bytes of a token's keys and values, in float32."""
PROMPTS = 4
NEAR = 0.15
"""Attention scores and activations, which are small beside a large cache, come on top."""
CASES = {
    "one turn, in two batches": ([(4, 40, 120)], 8),
    "two turns": ([(4, 50, 160), (3, 10, 60)], 64),
    "more rollouts of a prompt than rows": ([(8, 40, 80), (1, 10, 80)], 2),
    "a dialogue, in parts": ([(4, 40, 80), (1, 10, 80), (1, 10, 80), (1, 10, 80)], 4),
}
"""Copies, tokens of the opening and of the turn for each level; rows per batch."""


def measure_tokens(turns, max_rows, prompts, end_ids=()):
    """Peak memory of sampling, in tokens of the cache; without ends every turn is as long as it
    may be."""
    live = LiveBytes()
    with live, open_session(max_rows, end_ids) as session:
        sample(session, turns, prompts)
    return live.peak / TOKEN


@contextmanager
def open_session(max_rows, end_ids=()):
    policy = replace(build_policy(MODEL, 0), end_ids=end_ids)
    sampler = TransformersSampler(policy, max_rows=max_rows, device=torch.device("cpu"))
    with sampler.session() as session:
        yield session


def sample(session, turns, prompts, *, go_on=False):
    """Samples dialogues; if they could go on after their last turn, their caches are kept."""
    contexts = [(None, (5 + n,) * turns[0][1]) for n in range(prompts)]
    for number, (copies, _, limit) in enumerate(turns):
        is_last = number == len(turns) - 1
        seeds = range(copies)
        requests = [
            CompletionRequest(context, extends, seeds, is_last=is_last and not go_on)
            for extends, context in contexts
        ]
        drawn = session.generate(requests, TurnSpec(max_new_tokens=limit))
        question = (7,) * (0 if is_last else turns[number + 1][1])
        above = [context for _, context in contexts for _ in range(copies)]
        flat = [completion for completions in drawn for completion in completions]
        contexts = [
            (n, context + completion.token_ids + question)
            for n, (context, completion) in enumerate(zip(above, flat, strict=True))
        ]


@each_row("case", CASES)
def test_the_cache_takes_what_is_planned(case):
    turns, max_rows = CASES[case]
    levels, above = [], PROMPTS
    for copies, opening, limit in turns:
        sizes = {"opening": opening, "made_up": 0.0, "at_most": limit}
        levels.append(LevelTokens(kind="turn", turns=above * copies, openings=above, **sizes))
        above *= copies
    # A run samples as many prompts together as have `max_rows` dialogues.
    at_once = max(1, max_rows // turns[0][0])
    prompts = min(PROMPTS, at_once) if len(turns) > 1 else PROMPTS
    planned = count_cached_tokens(levels, 1, max_rows)
    assert measure_tokens(turns, max_rows, prompts) <= (1 + NEAR) * planned
    # About one token in thirty ends a turn of random weights.
    assert planned / 2.2 <= measure_tokens(turns, max_rows, prompts, (20, 21, 22)) <= 1.15 * planned


def test_dialogues_that_ended_leave_nothing_to_the_next():
    peaks = []
    for parts in (1, 2):
        live = LiveBytes()
        with live, open_session(64) as session:
            for _ in range(parts):
                sample(session, [(4, 40, 80), (1, 10, 80)], PROMPTS, go_on=True)
        peaks.append(live.peak)
    assert peaks[1] <= 1.01 * peaks[0]
