"""Steps of any size, sampled by nobody: trees, rewards and trained rows that can be recorded."""

from typing import Any

import numpy as np
import torch

from rlx.batch import build_token_batch
from rlx.plugin import Problem
from rlx.record.rollouts import TrainedRows, rollout_index, rollout_table
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx_registry import RolloutIndex

__all__ = ["body", "pieces", "sampled"]

ANSWERS = 8
PROMPT = 120
WORDS = ("the", "sum", "of", "eleven", "and", "eight", "is", "nineteen", "so", "we", "take", "five")


def body(rows: int, tokens: int, rng: np.random.Generator) -> tuple[Any, list[RolloutIndex]]:
    """The table of a step as a run records it, and its index."""
    trees, rewards, trained = sampled(rows, tokens, rng)
    table = rollout_table(trees, rewards, trained, pieces=pieces)
    return table, rollout_index(trees, rewards, trained)


def sampled(
    rows: int, tokens: int, rng: np.random.Generator
) -> tuple[list[RolloutTree], RewardTable, TrainedRows]:
    """A step with 8 answers of `tokens` tokens to each of its prompts."""
    trees = [_tree(number, tokens, rng) for number in range(rows // ANSWERS)]
    entry = {
        (t, s): {
            "accuracy": RewardEntry("accuracy", float((t + s) % 2), 1.0, "scored"),
            "format_score": RewardEntry("format_score", 1.0, 0.1, "scored"),
        }
        for t, tree in enumerate(trees)
        for s in range(1, len(tree.segments))
    }
    rewards = RewardTable(entry, frozenset(), {"accuracy": 1, "format_score": 1}, {})
    batch = build_token_batch(trees)
    shape, generator = batch.token_ids.shape, torch.Generator().manual_seed(0)
    names = ("weights", "advantages", "old_logprobs", "reference_logprobs", "token_rewards", "kl")
    noise = {name: torch.randn(shape, generator=generator) for name in names}
    places = [(r.tree, r.segment, r.parent, r.kind, r.level) for r in batch.rows]
    trained = TrainedRows(
        places, batch.group_ids, batch.is_own, {"mask": batch.is_own, **noise}, {}
    )
    return trees, rewards, trained


def pieces(ids: Any) -> list[str]:
    return [f" {WORDS[i % len(WORDS)]}" for i in ids]


def _tree(number: int, tokens: int, rng: np.random.Generator) -> RolloutTree:
    prompt = tuple(rng.integers(0, 150_000, PROMPT).tolist())
    segments = [Segment(parent=NO_PARENT, author="prompt", token_ids=prompt, text="?" * PROMPT)]
    for _ in range(ANSWERS):
        ids = tuple(rng.integers(0, 150_000, tokens).tolist())
        segments.append(
            Segment(
                parent=0,
                author="policy",
                token_ids=ids,
                logprobs=tuple(rng.standard_normal(tokens).astype("float32").tolist()),
                turn=1,
                kind="answer",
                finish_reason="stop",
                text="".join(pieces(ids)),
                spans={},
                seed=number,
                info={},
            )
        )
    problem = Problem(id=f"math/{number}", prompt="What is 8 + 11 - 5?", fields={"answer": "14"})
    return RolloutTree(problem, tuple(segments))
