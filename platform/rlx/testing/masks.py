"""Checks for mask strategies."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlx.batch import NO_TURN, TokenBatch, build_token_batch
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, Author, RolloutTree, Segment, Span
from rlx.testing.promise import PromiseCheck, Promises, bind_subject, run_checks

Mask = Callable[[TokenBatch], Tensor]
_SEEDS = range(5)
_SPANS = {"answer": ("think", "answer"), "confidence": ("analysis", "confidence"), "query": ()}
_PADDING = {"turn_ids": NO_TURN, "state_ids": NO_TURN, "temperatures": 1.0}
"""What stands in padding, where it is not 0."""
_promise = Promises()


def check_mask(mask: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `Mask` plugin, as class or
    instance, or a function of `TokenBatch` alone keeps them all."""
    run_checks(mask_checks(), mask)


def mask_checks() -> tuple[PromiseCheck, ...]:
    def call(run: Callable[[Mask, TokenBatch], None], subject: Any) -> None:
        mask = bind_subject(subject)
        for seed in _SEEDS:
            batch = example_batch(seed)
            if run is _check_own_tokens and getattr(subject, "beyond_own", False):
                outside = mask(batch) & ~batch.is_response
                assert not outside.any(), "selects a token before the row's own, or padding"
            else:
                run(mask, batch)

    return _promise.build_checks(call)


def example_batch(seed: int = 0) -> TokenBatch:
    """Random rows of unequal lengths: answers, some without their spans or truncated; confidences
    below some of them; and trajectories with observations between their turns."""
    rng = random.Random(f"batch/{seed}")
    trees = []
    for number in range(4):
        segments = [_sample_context_segment(rng, NO_PARENT, "prompt")]
        for _ in range(rng.randint(1, 4)):
            segments.append(_sample_policy_turn(rng, 0, 1, "query" if number == 3 else "answer"))
            above = len(segments) - 1
            if number == 3:
                segments.append(_sample_context_segment(rng, above, "environment"))
                segments.append(_sample_policy_turn(rng, above + 1, 2, "answer"))
            elif rng.random() < 0.5:
                segments.append(_sample_context_segment(rng, above, "prompt"))
                question = len(segments) - 1
                for _ in range(rng.randint(1, 3)):
                    segments.append(_sample_policy_turn(rng, question, 2, "confidence"))
        problem = Problem(id=str(number), prompt="?", fields={})
        trees.append(RolloutTree(problem, tuple(segments)))
    return build_token_batch(trees)


def _sample_context_segment(rng: random.Random, parent: int, author: Author) -> Segment:
    ids = tuple(rng.randint(1, 99) for _ in range(rng.randint(1, 4)))
    return Segment(parent=parent, author=author, token_ids=ids)


def _sample_policy_turn(rng: random.Random, parent: int, number: int, kind: str) -> Segment:
    length = rng.randint(1, 9)
    spans = {}
    for name in _SPANS[kind]:
        start, stop = sorted(rng.choices(range(length + 1), k=2))
        if rng.random() < 0.7:
            spans[name] = Span((start, stop), (min(start + 1, stop), stop), "")
    outer = [span.outer for span in spans.values()]
    return Segment(
        parent=parent,
        author="policy",
        token_ids=tuple(rng.randint(1, 99) for _ in range(length)),
        logprobs=tuple(-rng.random() for _ in range(length)),
        turn=number,
        kind=kind,
        finish_reason=rng.choice(["stop", "length"]),
        spans=spans,
        hull=(min(outer)[0], max(last for _, last in outer)) if outer else None,
    )


@_promise("returns bool of the batch's shape", "return bool `[B, T]`")
def _check_mask_shape(mask: Mask, batch: TokenBatch) -> None:
    learns = mask(batch)
    assert isinstance(learns, Tensor), f"returned {type(learns).__name__}, not a tensor"
    assert learns.dtype == torch.bool, f"returned {learns.dtype}"
    shape = tuple(learns.shape)
    assert shape == tuple(batch.is_own.shape), f"returned {shape} for {tuple(batch.is_own.shape)}"


@_promise(
    "selects only a row's own tokens",
    "end with `& batch.is_own`: prompts, observations and padding never learn, unless the class "
    "says `beyond_own`",
)
def _check_own_tokens(mask: Mask, batch: TokenBatch) -> None:
    assert not (mask(batch) & ~batch.is_own).any(), "selects a token that is not the row's own"


@_promise(
    "does not modify the batch",
    "begin with `torch.zeros_like` or `.clone()`, not with a field of the batch",
)
def _check_batch_unchanged(mask: Mask, batch: TokenBatch) -> None:
    before = copy.deepcopy(batch)
    mask(batch)
    for name, was in vars(before).items():
        now = getattr(batch, name)
        pairs = [(now, was)] if isinstance(was, Tensor) else []
        if isinstance(was, dict):
            assert now.keys() == was.keys(), f"wrote into batch.{name}"
            pairs = [(now[key], was[key]) for key in was]
        assert all(torch.equal(*pair) for pair in pairs), f"wrote into batch.{name}"


@_promise("is deterministic", "draw no random numbers")
def _check_mask_determinism(mask: Mask, batch: TokenBatch) -> None:
    assert torch.equal(mask(batch), mask(batch)), "returned a different mask the second time"


@_promise("ignores the order of rows", "rows of a group need not be neighbours")
def _check_mask_row_order(mask: Mask, batch: TokenBatch) -> None:
    order = torch.randperm(len(batch.rows), generator=torch.Generator().manual_seed(1))
    moved = _map_batch_tensors(batch, lambda _, tensor: tensor[order])
    moved = replace(moved, rows=tuple(batch.rows[i] for i in order.tolist()))
    assert torch.equal(mask(moved), mask(batch)[order]), "depends on the order of rows"


@_promise("ignores padding", "count tokens that are `is_own`, not positions")
def _check_mask_padding(mask: Mask, batch: TokenBatch) -> None:
    def pad(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            return tensor
        return torch.cat([tensor, torch.full_like(tensor[:, :2], _PADDING.get(name, 0))], dim=1)

    padded = mask(_map_batch_tensors(batch, pad))
    length = batch.is_own.shape[1]
    assert torch.equal(padded[:, :length], mask(batch)), "depends on padding on the right"


def _map_batch_tensors(batch: TokenBatch, change: Callable[[str, Tensor], Tensor]) -> TokenBatch:
    changed: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            changed[name] = change(name, value)
        elif isinstance(value, dict):
            changed[name] = {key: change(name, sheet) for key, sheet in value.items()}
    return replace(batch, **changed)
