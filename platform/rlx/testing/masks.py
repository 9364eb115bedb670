"""Checks for mask strategies. Plugin authors: call `check_mask`, or use `mask_checks`."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlx.batch import NO_TURN, TokenBatch, build_token_batch
from rlx.credit import CreditInputs, PlacedRewards, place_rewards, sum_token_rewards
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, Author, RolloutTree, Segment, Span
from rlx.testing.estimators import example_inputs
from rlx.testing.promise import (
    PromiseCheck,
    bind_subject,
    build_subject_plugin,
    common_checks,
    is_plugin,
    run_checks,
)

Mask = Callable[[TokenBatch], Tensor]


_SEEDS = range(5)


_SPANS = {"answer": ("think", "answer"), "confidence": ("analysis", "confidence"), "query": ()}


_PADDING = {
    "turn_ids": NO_TURN,
    "state_ids": NO_TURN,
    "temperatures": 1.0,
}  # all other streams are 0 in padding


def check_mask(mask: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a mask strategy keeps them all.

    Args:
        mask: a `Mask` plugin, as class or instance; or a function that takes only `TokenBatch`.
    """
    run_checks(mask_checks(), mask)


def mask_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for mask strategies."""
    own: tuple[tuple[str, str, Callable[[Mask, TokenBatch], None]], ...] = (
        ("returns bool of the batch's shape", "return bool `[B, T]`", _check_mask_shape),
        (
            "selects only a row's own tokens",
            "end with `& batch.is_own`: prompts, observations and padding never learn, unless "
            "the class says `beyond_own`",
            _check_own_tokens,
        ),
        (
            "does not modify the batch",
            "begin with `torch.zeros_like` or `.clone()`, not with a field of the batch",
            _check_batch_unchanged,
        ),
        ("is deterministic", "draw no random numbers", _check_mask_determinism),
        (
            "ignores the order of rows",
            "rows of a group need not be neighbours",
            _check_mask_row_order,
        ),
        ("ignores padding", "count tokens that are `is_own`, not positions", _check_mask_padding),
    )
    return (
        *common_checks(),
        *(PromiseCheck(name, help_, partial(_run_mask_examples, run)) for name, help_, run in own),
    )


def _run_mask_examples(run: Callable[[Mask, TokenBatch], None], subject: Any) -> None:
    mask = bind_subject(subject)
    if run is _check_own_tokens and getattr(subject, "beyond_own", False):
        run = _check_response_tokens
    for seed in _SEEDS:
        run(mask, example_batch(seed))


# Examples ----------------------------------------------------------------------------------------
def example_batch(seed: int = 0) -> TokenBatch:
    """Random rows of every form.

    Returns:
        Rows of unequal lengths: answers, some without their spans or truncated; confidences below
        some of them; and trajectories with observations of an environment between their turns.
    """
    rng = random.Random(f"batch/{seed}")
    return build_token_batch([_sample_example_tree(rng, number) for number in range(4)])


def _sample_example_tree(rng: random.Random, number: int) -> RolloutTree:
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
    return RolloutTree(Problem(id=str(number), prompt="?", fields={}), tuple(segments))


def _sample_context_segment(rng: random.Random, parent: int, author: Author) -> Segment:
    """A segment that the policy did not write."""
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


# Checks -------------------------------------------------------------------------------------------
def _check_mask_shape(mask: Mask, batch: TokenBatch) -> None:
    learns = mask(batch)
    assert isinstance(learns, Tensor), f"returned {type(learns).__name__}, not a tensor"
    assert learns.dtype == torch.bool, f"returned {learns.dtype}"
    shape = tuple(learns.shape)
    assert shape == tuple(batch.is_own.shape), f"returned {shape} for {tuple(batch.is_own.shape)}"


def _check_own_tokens(mask: Mask, batch: TokenBatch) -> None:
    assert not (mask(batch) & ~batch.is_own).any(), "selects a token that is not the row's own"


def _check_response_tokens(mask: Mask, batch: TokenBatch) -> None:
    outside = mask(batch) & ~batch.is_response
    assert not outside.any(), "selects a token before the row's own, or padding"


def _check_batch_unchanged(mask: Mask, batch: TokenBatch) -> None:
    before = _map_batch_tensors(batch, lambda _, tensor: tensor.clone())
    mask(batch)
    for name, was in vars(before).items():
        assert _is_unchanged(getattr(batch, name), was), f"wrote into batch.{name}"


def _is_unchanged(now: Any, was: Any) -> bool:
    if isinstance(was, Tensor):
        return torch.equal(now, was)
    if isinstance(was, dict):
        return now.keys() == was.keys() and all(torch.equal(now[key], was[key]) for key in was)
    return bool(now == was)


def _check_mask_determinism(mask: Mask, batch: TokenBatch) -> None:
    assert torch.equal(mask(batch), mask(batch)), "returned a different mask the second time"


def _check_mask_row_order(mask: Mask, batch: TokenBatch) -> None:
    order = torch.randperm(len(batch.rows), generator=torch.Generator().manual_seed(1))
    moved = _map_batch_tensors(batch, lambda _, tensor: tensor[order])
    moved = replace(moved, rows=tuple(batch.rows[i] for i in order.tolist()))
    assert torch.equal(mask(moved), mask(batch)[order]), "depends on the order of rows"


def _check_mask_padding(mask: Mask, batch: TokenBatch) -> None:
    padded = mask(_map_batch_tensors(batch, _pad_batch_tensor))
    length = batch.is_own.shape[1]
    assert torch.equal(padded[:, :length], mask(batch)), "depends on padding on the right"


def _pad_batch_tensor(name: str, tensor: Tensor) -> Tensor:
    if tensor.dim() == 1:
        return tensor
    return torch.cat([tensor, torch.full_like(tensor[:, :2], _PADDING.get(name, 0))], dim=1)


def _map_batch_tensors(batch: TokenBatch, change: Callable[[str, Tensor], Tensor]) -> TokenBatch:
    """The batch with `change(name, tensor)` applied to each of its tensors."""
    changed: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            changed[name] = change(name, value)
        elif isinstance(value, dict):
            changed[name] = {key: change(name, sheet) for key, sheet in value.items()}
    return replace(batch, **changed)


Place = Callable[[CreditInputs], PlacedRewards]


_PLACEMENT_SEEDS = range(5)


def check_placement(place: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a placement keeps them all.

    Args:
        place: a `Placement` plugin, as class or instance; or a function that is called as
            `place(inputs)` with `CreditInputs`, like `rlx.credit.place_rewards` with its options
            bound, and returns `PlacedRewards`.
    """
    run_checks(placement_checks(), place)


def placement_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for placements."""
    own: tuple[tuple[str, str, Callable[[Place, CreditInputs], None]], ...] = (
        ("keeps shape and dtype", "return `[B, T]` as the rewards are", _check_placement_shape),
        (
            "is zero outside the mask",
            "select by `torch.where(mask, ..., 0)`",
            _check_masked_placement,
        ),
        (
            "accounts for every reward",
            "what lies on no token is `lost`: placed and lost add up to the same for any mask",
            _check_reported_losses,
        ),
        (
            "is linear",
            "twice the rewards are twice the token rewards: no threshold, no normalisation",
            _check_placement_linearity,
        ),
        (
            "ignores absent rewards",
            "read `turn_rewards` only where `turn_present`",
            _check_placement_absent_rewards,
        ),
        (
            "ignores row order",
            "a row's tokens depend on that row alone",
            _check_placement_row_order,
        ),
        (
            "ignores padding",
            "find the last token by the mask, not by the width",
            _check_placement_padding,
        ),
    )
    return (
        *common_checks(),
        *(
            PromiseCheck(name, help_, partial(_run_placement_examples, run))
            for name, help_, run in own
        ),
    )


def _run_placement_examples(run: Callable[[Place, CreditInputs], None], subject: Any) -> None:
    place = subject
    if is_plugin(subject):
        place = partial(place_rewards, placement=build_subject_plugin(subject))
    for seed in _PLACEMENT_SEEDS:
        for dtype in (torch.float32, torch.float64):
            run(place, example_inputs(seed, dtype=dtype))


def _check_placement_shape(place: Place, inputs: CreditInputs) -> None:
    tokens = place(inputs).token_rewards
    assert tokens.shape == inputs.mask.shape, "changed the shape [B, T]"
    assert tokens.dtype == inputs.turn_rewards.dtype, "changed the dtype of the rewards"


def _check_masked_placement(place: Place, inputs: CreditInputs) -> None:
    tokens = place(inputs).token_rewards
    assert tokens.isfinite().all(), "is not finite although every reward is"
    assert not (tokens[~inputs.mask] != 0).any(), "gave reward to a token outside the mask"


def _check_reported_losses(place: Place, inputs: CreditInputs) -> None:
    everything = replace(inputs, mask=inputs.turn_ids > 0)
    sums = []
    for case_inputs in (inputs, everything):
        placed = place(case_inputs)
        sums.append(sum_token_rewards(placed.token_rewards, case_inputs.mask) + placed.lost)
    torch.testing.assert_close(
        *sums, rtol=1e-4, atol=1e-4, msg="what is placed and lost depends on the mask"
    )


def _check_placement_linearity(place: Place, inputs: CreditInputs) -> None:
    twice = replace(
        inputs,
        turn_rewards=2 * inputs.turn_rewards,
        global_rewards=2 * inputs.global_rewards,
    )
    one, two = (
        place(inputs).token_rewards,
        place(twice).token_rewards,
    )
    torch.testing.assert_close(2 * one, two, msg="is not linear in the rewards")


def _check_placement_absent_rewards(place: Place, inputs: CreditInputs) -> None:
    poisoned = replace(
        inputs, turn_rewards=torch.where(inputs.turn_present, inputs.turn_rewards, torch.nan)
    )
    actual, expected = (
        place(poisoned).token_rewards,
        place(inputs).token_rewards,
    )
    torch.testing.assert_close(actual, expected, msg="depends on the reward of an absent turn")


def _check_placement_row_order(place: Place, inputs: CreditInputs) -> None:
    order = torch.randperm(len(inputs.mask), generator=torch.Generator().manual_seed(1))
    moved: dict[str, Any] = {
        name: value[order] for name, value in vars(inputs).items() if isinstance(value, Tensor)
    }
    actual = place(replace(inputs, **moved)).token_rewards
    expected = place(inputs).token_rewards[order]
    torch.testing.assert_close(actual, expected, msg="depends on the order of rows")


def _check_placement_padding(place: Place, inputs: CreditInputs) -> None:
    def pad_token_tensor(tensor: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, 2), value=fill)

    wider = CreditInputs.from_rewards(
        inputs.turn_rewards,
        inputs.turn_present,
        inputs.global_rewards,
        pad_token_tensor(inputs.turn_ids, -1),
        pad_token_tensor(inputs.mask, False),
    )
    wide = place(wider).token_rewards
    length = inputs.mask.shape[1]
    expected = place(inputs).token_rewards
    torch.testing.assert_close(wide[:, :length], expected, msg="depends on padding")
    assert (wide[:, length:] == 0).all(), "gave reward to padding"
