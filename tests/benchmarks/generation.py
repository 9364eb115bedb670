"""Sampling beside transformers' `generate`: trees of two turns, and one turn.

Ours gives log-probabilities of what it draws; `generate` gives tokens alone, of the same model.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from harness import Spent, compared, in_turns, spent
from models import policy
from transformers import DynamicCache

from rlx.model import Policy
from rlx.rollout import CompletionRequest
from rlx.sampler import TransformersSampler
from rlx.spec import TurnSpec

__all__ = ["continue_cached", "generated_both_turns", "one_turn_generation", "two_turn_generation"]

PROMPT, ANSWER, QUESTION, CONFIDENCE, ANSWERS, CONFIDENCES = 100, 60, 30, 12, 8, 4
PROMPTS, NEW, EACH = 8, 64, 8
ENDS = (20, 40, 60, 80)
"""Characters that end a turn where lengths are ragged: about one draw in thirty is one of them."""
ROUNDS = 5


def two_turn_generation() -> list[dict]:
    """Answers of four prompts, and confidences below every answer, all forced to length."""
    torch.set_num_threads(1)
    sampler, peer = sampler_of(policy()), policy()
    prompts, question = drawn(4, PROMPT, 1), drawn(1, QUESTION, 2)[0]

    def ours() -> None:
        asked = requests(prompts, ANSWERS)
        with sampler.session() as session:
            given = session.generate(asked, TurnSpec(max_new_tokens=ANSWER))
            below = [
                prompt + completion.token_ids + question
                for prompt, completions in zip(prompts, given, strict=True)
                for completion in completions
            ]
            asked = requests(below, CONFIDENCES, extend=True)
            session.generate(asked, TurnSpec(max_new_tokens=CONFIDENCE))

    def theirs() -> None:
        said = generated(peer, prompts, ANSWERS, ANSWER)
        below = [tuple(row) + question for row in said.tolist()]
        generated(peer, below, CONFIDENCES, CONFIDENCE)

    def cached() -> None:
        generated_both_turns(peer, prompts, question)

    sides = {"theirs": theirs, "cached": cached, "ours": ours}
    took = in_turns({name: partial(spent, side) for name, side in sides.items()}, ROUNDS)
    weaker, strongest = "weaker: generate, every branch read anew", "generate, one cache kept"
    return [
        compared("two_turn_generation", took["theirs"], took["ours"], weaker),
        compared("two_turn_generation_strongest", took["cached"], took["ours"], strongest),
    ]


def one_turn_generation() -> list[dict]:
    """Answers of eight prompts, all forced to length, or each ended by what it draws."""
    torch.set_num_threads(1)
    return [_one_turn("full", ()), _one_turn("ragged", ENDS)]


def _one_turn(name: str, ends: Sequence[int]) -> dict:
    speaker, peer = (replace(policy(), end_ids=tuple(ends)) for _ in range(2))
    sampler, prompts = sampler_of(speaker), drawn(PROMPTS, PROMPT, 3)
    lengths: list[int] = []

    def ours() -> Spent:
        asked, given = requests(prompts, EACH, first=len(lengths)), []
        with sampler.session() as session:
            took = spent(
                lambda: given.append(session.generate(asked, TurnSpec(max_new_tokens=NEW)))
            )
        lengths.extend(len(c.token_ids) for completions in given[0] for c in completions)
        return took

    took = in_turns(
        {"theirs": lambda: spent(lambda: generated(peer, prompts, EACH, NEW)), "ours": ours}, ROUNDS
    )
    share = sum(lengths) / len(lengths) / NEW
    baseline = f"generate, mean length {share:.2f} of {NEW}"
    return compared(f"one_turn_generation_{name}", took["theirs"], took["ours"], baseline)


def sampler_of(speaker: Policy) -> TransformersSampler:
    """Ours, on one core."""
    return TransformersSampler(speaker, max_rows=512, device=torch.device("cpu"))


def requests(
    contexts: Sequence[tuple[int, ...]], each: int, *, extend: bool = False, first: int = 0
) -> list[CompletionRequest]:
    """`each` continuations of every context, each with a seed of its own."""
    return [
        CompletionRequest(
            context,
            number if extend else None,
            tuple(range(first + number * each, first + (number + 1) * each)),
        )
        for number, context in enumerate(contexts)
    ]


def drawn(count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Random characters."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 100, (count, length), generator=generator)
    return [tuple(row) for row in ids.tolist()]


def generated_both_turns(
    speaker: Policy, prompts: Sequence[tuple[int, ...]], question: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers, and confidences below each, by `generate` with one cache for both turns.

    Prompts and the question are read before their branches part, so that no token is read twice.

    Returns:
        `[R, prompt + answer]` and `[R · confidences, whole]`, branches of a row side by side.
    """
    cache = DynamicCache(config=speaker.model.config)
    answers = continue_cached(speaker, torch.tensor(prompts), cache, ANSWERS, ANSWER)
    asked = torch.cat([answers, torch.tensor(question).expand(len(answers), -1)], dim=1)
    return answers, continue_cached(speaker, asked, cache, CONFIDENCES, CONFIDENCE)


def continue_cached(
    speaker: Policy, ids: torch.Tensor, cache: DynamicCache, each: int, length: int
) -> torch.Tensor:
    """`each` continuations of every row of `ids`, whose first tokens the cache has."""
    with torch.no_grad():
        known = cache.get_seq_length()
        speaker.model(ids[:, known:-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(each)
    return generated(speaker, ids.repeat_interleave(each, dim=0), 1, length, cache)


def generated(
    speaker: Policy,
    contexts: Sequence[tuple[int, ...]] | torch.Tensor,
    each: int,
    length: int,
    cache: DynamicCache | None = None,
) -> torch.Tensor:
    """`each` continuations of every context by `generate`, `[R, context + length]`."""
    ids = torch.as_tensor(contexts)
    ends = {"eos_token_id": list(speaker.end_ids)} if speaker.end_ids else {}
    return speaker.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        num_return_sequences=each,
        min_new_tokens=None if ends else length,
        max_new_tokens=length,
        pad_token_id=0,
        past_key_values=cache,
        **ends,
    )
