"""Checks for placements: functions that put the rewards of turns and rollouts on tokens.

Plugin authors: call `check_placement` with the plugin, or use `placement_checks`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlx.credit import CreditInputs, PlacedRewards, place_rewards, sum_token_rewards
from rlx.testing.estimators import example_inputs
from rlx.testing.promise import (
    PromiseCheck,
    build_subject_plugin,
    common_checks,
    is_plugin,
    run_checks,
)

__all__ = ["check_placement", "placement_checks"]

Place = Callable[[CreditInputs], PlacedRewards]

_SEEDS = range(5)


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
    for seed in _SEEDS:
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
