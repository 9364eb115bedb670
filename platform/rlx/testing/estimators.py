"""Checks for advantage estimators and placements, which both give values to tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from rlx.batch import NO_TURN
from rlx.credit import Credit, CreditInputs, place_rewards, sum_token_rewards
from rlx.discovery import list_needed_streams
from rlx.plugin import Estimator as EstimatorPlugin
from rlx.spec import TurnProportional
from rlx.testing.promise import (
    PromiseCheck,
    Promises,
    bind_subject,
    build_subject_plugin,
    is_plugin,
    run_checks,
)
from rlx_registry import STREAMS, TokenStream

Function = Callable[[CreditInputs], Tensor | Credit | CreditInputs]

_SEEDS = range(5)
_GROUP_SIZES = (4, 2, 5, 3, 12, 1)
"""Answers per prompt: unequal, a group of one, and a group large enough to round its mean."""
_LENGTH, _TURNS = 7, 3
_of_estimators, _of_placements = Promises(), Promises()


def example_inputs(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> CreditInputs:
    """Random inputs that follow every convention, with every stream that an estimator may need:
    rows in random order, answers (level 0, turn 1) in groups of unequal sizes, confidences (level
    1, turns 2 and 3, some of them unrewarded) below some of the answers, and rows without learning
    tokens."""
    rng = torch.Generator().manual_seed(seed)
    trees = torch.arange(len(_GROUP_SIZES)).repeat_interleave(torch.tensor(_GROUP_SIZES))
    has_confidences = torch.rand(len(trees), generator=rng) < 0.5
    below = torch.randint(1, 5, (int(has_confidences.sum()),), generator=rng)
    answers, rows = len(trees), len(trees) + int(below.sum())
    confidence_groups = torch.arange(len(below)).repeat_interleave(below) + len(_GROUP_SIZES)
    levels = (torch.arange(rows) >= answers).long()

    present = torch.rand(rows, _TURNS, generator=rng) < 0.7
    present[:answers] = torch.tensor([True, False, False])
    present[answers:, 0] = False
    rewards = torch.randn(rows, _TURNS, generator=rng, dtype=dtype)
    # A prompt, then turn 1 for answers, turns 2 and 3 for confidences, then padding.
    position = torch.arange(_LENGTH)
    start, stop = (
        torch.randint(*ends, (len(levels), 1), generator=rng) for ends in ((1, 3), (4, 8))
    )
    number = 1 + levels[:, None] * (1 + (position > 3).long())
    turn_ids = torch.where((position >= start) & (position < stop), number, NO_TURN)
    turn_rewards = torch.where(present, rewards, 0.0)
    tree_ids = torch.cat([trees, trees[has_confidences].repeat_interleave(below)])
    has_turn = torch.stack([(turn_ids == k + 1).any(dim=1) for k in range(_TURNS)], dim=1)
    named = torch.Generator().manual_seed(seed)  # three, some of them absent, of several scales
    named_rewards = torch.randn(rows, 3, generator=named, dtype=dtype) * torch.tensor([1, 10, 1])
    is_absent = torch.rand(rows, 3, generator=named) < 0.2
    named_rewards = named_rewards.masked_fill(is_absent, torch.nan)
    inputs = CreditInputs(
        turn_rewards=turn_rewards,
        turn_present=present,
        global_rewards=torch.randn(rows, generator=rng, dtype=dtype),
        token_rewards=torch.zeros(rows, _LENGTH, dtype=dtype),
        turn_ids=turn_ids,
        mask=(turn_ids > 0) & (torch.rand(rows, _LENGTH, generator=rng) < 0.7),
        group_ids=torch.cat([trees, confidence_groups]),
        levels=levels,
        tree_ids=tree_ids,
        state_ids=torch.where(has_turn, torch.randint(0, 3, (rows, _TURNS), generator=rng), -1),
        labels=(torch.arange(rows) % 2).to(dtype),
        named_rewards=named_rewards,
        reward_weights=(1.0, 0.5, 0.0),
        streams={
            stream.name: _draw_stream(stream, tree_ids, turn_ids, rng, dtype)
            for stream in STREAMS.values()
            if stream.is_output
        },
    )
    return select_input_rows(_fill_token_rewards(inputs), torch.randperm(rows, generator=rng))


def _draw_stream(
    stream: TokenStream,
    tree_ids: Tensor,
    turn_ids: Tensor,
    rng: torch.Generator,
    dtype: torch.dtype,
) -> Tensor:
    """Random values of a stream, with reasoning steps of three tokens."""
    if stream.dtype == "int64":
        return torch.where(turn_ids > 0, torch.arange(_LENGTH) // 3, -1)
    if stream.shape == "[B]":
        return torch.randn(len(_GROUP_SIZES), generator=rng, dtype=dtype)[tree_ids]
    if stream.shape == "[B, S + 1]":
        return torch.rand(len(tree_ids), _LENGTH // 3 + 2, generator=rng, dtype=dtype)
    values = torch.randn(turn_ids.shape, generator=rng, dtype=dtype)
    return -values.abs() if stream.unit == "nats" else values


def _fill_token_rewards(inputs: CreditInputs) -> CreditInputs:
    placed = place_rewards(inputs, placement=TurnProportional())
    return replace(inputs, token_rewards=placed.token_rewards)


def check_estimator(estimator: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless an `Estimator` plugin, as class or
    instance, keeps them all; or a function of `CreditInputs` alone that returns `[B, T]`
    advantages."""
    run_checks(estimator_checks(), estimator)


def estimator_checks() -> tuple[PromiseCheck, ...]:
    """The checks for estimators. One that needs other inputs than these is skipped."""

    def call(run: Callable[[Function, CreditInputs], None], subject: Any) -> None:
        if is_plugin(subject):
            wanted = {*list_needed_streams(subject)}
            if lacking := wanted - _get_input_tensors(example_inputs()).keys():
                raise SkipTest(f"it needs {', '.join(sorted(lacking))}, which no example here has")
            plugin: EstimatorPlugin = build_subject_plugin(subject)
            reads_rows = not plugin.needs and plugin.reading() != "token_rewards"
            if run is _check_equal_rewards and not reads_rows:
                raise SkipTest("it does not compare rows with each other")
        _run_on_examples(run, bind_subject(subject))

    return _of_estimators.build_checks(call)


def check_placement(place: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `Placement` plugin, as class or
    instance, keeps them all; or a function that takes only `CreditInputs` and returns them with the
    rewards placed."""
    run_checks(placement_checks(), place)


def placement_checks() -> tuple[PromiseCheck, ...]:
    def call(run: Callable[[Function, CreditInputs], None], subject: Any) -> None:
        place = subject
        if is_plugin(subject):
            place = partial(place_rewards, placement=build_subject_plugin(subject))
        _run_on_examples(run, place)

    return _of_placements.build_checks(call)


def _run_on_examples(run: Callable[[Function, CreditInputs], None], function: Function) -> None:
    for seed in _SEEDS:
        for dtype in (torch.float32, torch.float64):
            run(function, example_inputs(seed, dtype=dtype))


def _of_both(name: str, help: str) -> Callable[[Any], Any]:

    def add(run: Callable[[Function, CreditInputs], None]) -> Any:
        return _of_placements(name, help)(_of_estimators(name, help)(run))

    return add


def _compute_tokens(function: Function, inputs: CreditInputs) -> Tensor:
    """`[B, T]` advantages, or rewards on tokens."""
    result = function(inputs)
    if isinstance(result, Credit):
        return result.advantages
    return result.token_rewards if isinstance(result, CreditInputs) else result


def _assert_same_values(actual: Tensor, expected: Tensor, complaint: str) -> None:
    torch.testing.assert_close(actual, expected, msg=complaint)


@_of_both("keeps shape and dtype", "return `[B, T]` as the rewards are")
def _check_shape(function: Function, inputs: CreditInputs) -> None:
    values = _compute_tokens(function, inputs)
    assert values.shape == inputs.mask.shape, "changed the shape [B, T]"
    assert values.dtype == inputs.turn_rewards.dtype, "changed the dtype of the rewards"


@_of_both("does not modify its inputs", "change no tensor in place")
def _check_inputs_unchanged(function: Function, inputs: CreditInputs) -> None:
    before = {name: tensor.clone() for name, tensor in _get_input_tensors(inputs).items()}
    function(inputs)
    for name, tensor in _get_input_tensors(inputs).items():
        same = tensor.isclose(before[name], rtol=0, atol=0, equal_nan=True)
        assert same.all(), f"wrote into its input {name}"


@_of_both(
    "is finite, and zero outside the mask",
    "select by `torch.where(mask, ..., 0)`; add an epsilon before dividing",
)
def _check_masked_values(function: Function, inputs: CreditInputs) -> None:
    values = _compute_tokens(function, inputs)
    assert values.isfinite().all(), "is not finite although every reward is"
    assert not (values[~inputs.mask] != 0).any(), "gave something to a token outside the mask"


@_of_both("ignores row order", "compare rows by `group_ids`, never by position")
def _check_row_order(function: Function, inputs: CreditInputs) -> None:
    order = torch.randperm(len(inputs.mask), generator=torch.Generator().manual_seed(1))
    actual = _compute_tokens(function, select_input_rows(inputs, order))
    expected = _compute_tokens(function, inputs)[order]
    _assert_same_values(actual, expected, "depends on the order of rows")


@_of_both("ignores padding", "count tokens by the mask, turns by `turn_present`")
def _check_padding(function: Function, inputs: CreditInputs) -> None:
    wide, expected = (_compute_tokens(function, x) for x in (pad_inputs(inputs), inputs))
    _assert_same_values(wide[:, :_LENGTH], expected, "depends on padding on the right")
    assert (wide[:, _LENGTH:] == 0).all(), "gave something to padding"
    more_turns = replace(
        inputs,
        turn_rewards=_pad_tensor(inputs.turn_rewards, 0.0),
        turn_present=_pad_tensor(inputs.turn_present, False),
        state_ids=_pad_tensor(inputs.state_ids, -1),
    )
    complaint = "depends on how many turns other rows have"
    _assert_same_values(_compute_tokens(function, more_turns), expected, complaint)


@_of_both(
    "ignores absent rewards",
    "read `turn_rewards` only where `turn_present`: absent is not zero",
)
def _check_absent_rewards(function: Function, inputs: CreditInputs) -> None:
    rewards = torch.where(inputs.turn_present, inputs.turn_rewards, torch.nan)
    actual = _compute_tokens(function, replace(inputs, turn_rewards=rewards))
    expected = _compute_tokens(function, inputs)
    _assert_same_values(actual, expected, "depends on the reward of an absent turn")


@_of_estimators(
    "gives zero for equal rewards",
    "compare a group's largest score with its smallest, not with the mean",
)
def _check_equal_rewards(estimator: Function, inputs: CreditInputs) -> None:
    """Uses 0.7 in float32: the sum of n times 0.7, divided by n, is not exactly 0.7."""
    answers = torch.tensor([True, *[False] * (_TURNS - 1)])
    present = torch.where((inputs.levels == 0)[:, None], answers, ~answers)
    equal = replace(
        inputs,
        turn_rewards=torch.where(present, inputs.turn_rewards.new_tensor(0.7), 0.0),
        turn_present=present,
        global_rewards=torch.full_like(inputs.global_rewards, 0.7),
        state_ids=torch.where(present, torch.arange(_TURNS), -1),
        named_rewards=torch.full((len(present), 2), 0.7).to(inputs.turn_rewards),
        reward_weights=(1.0, 0.3),
    )
    _, slot, size = inputs.group_ids.unique(return_inverse=True, return_counts=True)
    advantages = _compute_tokens(estimator, _fill_token_rewards(equal))[size[slot] > 1]
    assert (advantages == 0).all(), "did not give exactly 0 in a group of equal rewards"


@_of_estimators(
    "ignores values outside the mask",
    "select by `torch.where(mask, x, 0)`; a product with the mask keeps NaN",
)
def _check_outside_ignored(estimator: Function, inputs: CreditInputs) -> None:
    def poison(tensor: Tensor) -> Tensor:
        return torch.where(inputs.mask, tensor, torch.nan)

    streams = {
        name: poison(tensor)
        if STREAMS[name].shape == "[B, T]" and STREAMS[name].dtype == "float32"
        else tensor
        for name, tensor in inputs.streams.items()
    }
    poisoned = replace(inputs, token_rewards=poison(inputs.token_rewards), streams=streams)
    actual, expected = (_compute_tokens(estimator, x) for x in (poisoned, inputs))
    _assert_same_values(actual, expected, "depends on values outside the mask")


@_of_estimators("ignores the values of ids", "ids only say which rows belong together")
def _check_id_renaming(estimator: Function, inputs: CreditInputs) -> None:
    groups, trees = 10**12 - 7 * inputs.group_ids, 3 - 5 * inputs.tree_ids
    actual = _compute_tokens(estimator, replace(inputs, group_ids=groups, tree_ids=trees))
    expected = _compute_tokens(estimator, inputs)
    _assert_same_values(actual, expected, "depends on the ids of groups")


@_of_placements(
    "accounts for every reward",
    "what lies on no token is `lost`: placed and lost add up to the same for any mask",
)
def _check_reported_losses(
    place: Callable[[CreditInputs], CreditInputs], inputs: CreditInputs
) -> None:
    sums = []
    for each in (inputs, replace(inputs, mask=inputs.turn_ids > 0)):
        placed = place(each)
        assert placed.lost is not None, "does not say what is lost"
        sums.append(sum_token_rewards(placed.token_rewards, each.mask) + placed.lost)
    message = "what is placed and lost depends on the mask"
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-4, msg=message)


@_of_placements(
    "is linear", "twice the rewards are twice the token rewards: no threshold, no normalisation"
)
def _check_placement_linearity(place: Function, inputs: CreditInputs) -> None:
    doubled = replace(
        inputs, turn_rewards=2 * inputs.turn_rewards, global_rewards=2 * inputs.global_rewards
    )
    two, one = (_compute_tokens(place, x) for x in (doubled, inputs))
    _assert_same_values(2 * one, two, "is not linear in the rewards")


def _get_input_tensors(inputs: CreditInputs) -> dict[str, Tensor]:
    own = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    return {**own, **inputs.streams}


def select_input_rows(inputs: CreditInputs, which: Tensor) -> CreditInputs:
    """Some rows, or all in another order."""
    chosen = {name: tensor[which] for name, tensor in _get_input_tensors(inputs).items()}
    streams = {name: chosen.pop(name) for name in inputs.streams}
    parts: dict[str, Any] = {**chosen, "streams": streams}
    return replace(inputs, **parts)


def pad_inputs(inputs: CreditInputs) -> CreditInputs:
    """The same rows with two more tokens of padding on the right."""
    return replace(
        inputs,
        mask=_pad_tensor(inputs.mask, False),
        turn_ids=_pad_tensor(inputs.turn_ids, NO_TURN),
        token_rewards=_pad_tensor(inputs.token_rewards, 0.0),
        streams={
            name: _pad_tensor(tensor, 0.0 if tensor.is_floating_point() else -1)
            if STREAMS[name].shape == "[B, T]"
            else tensor
            for name, tensor in inputs.streams.items()
        },
    )


def _pad_tensor(tensor: Tensor, fill: float) -> Tensor:
    return torch.cat([tensor, torch.full_like(tensor[:, :2], fill)], dim=1)
