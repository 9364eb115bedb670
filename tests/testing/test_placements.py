"""The promises of placements: ours keep them, and they have teeth."""

from dataclasses import replace
from functools import partial
from typing import get_args

import bound
import pytest
import torch

from rlx.credit import place_rewards
from rlx.discovery import list_installed_plugins
from rlx.spec.estimator import TurnReduce
from rlx.testing import check_placement

PLACEMENTS = [found.name for found in list_installed_plugins("placement")]


def test_every_placement_keeps_every_promise(subtests):
    for placement in PLACEMENTS:
        for turn_reduce in (None, *get_args(TurnReduce)):
            for on_missing_turn in ("drop", "to_last_token"):
                with subtests.test(
                    placement=placement, turn_reduce=turn_reduce, on_missing_turn=on_missing_turn
                ):
                    options = {"turn_reduce": turn_reduce, "on_missing_turn": on_missing_turn}
                    check_placement(
                        partial(place_rewards, placement=bound.placement(placement), **options)
                    )


def changed(change):
    def broken(x):
        placed = place_rewards(x, placement=bound.placement("turn_end"))
        tensors = (x.turn_rewards, x.turn_present, x.global_rewards, x.turn_ids, x.mask)
        return replace(placed, **change(placed, *tensors))

    return broken


BROKEN = {
    "outside the mask": lambda p, r, c, g, ids, m: {"token_rewards": p.token_rewards + (ids < 0)},
    "depends on the mask": lambda p, r, c, g, ids, m: {"lost": torch.zeros_like(p.lost)},
    "not linear": lambda p, *_: {
        "token_rewards": p.token_rewards.clamp(max=0.5),
        "lost": p.lost + (p.token_rewards - 0.5).clamp(min=0).sum(dim=1),
    },
    "absent turn": lambda p, r, c, g, ids, m: {
        "token_rewards": p.token_rewards + torch.where(m, 0 * r.sum(dim=1, keepdim=True), 0.0)
    },
    "order of rows": lambda p, r, c, g, ids, m: {
        "token_rewards": p.token_rewards * torch.arange(1, len(m) + 1)[:, None],
        "lost": p.lost * torch.arange(1, len(m) + 1),
    },
    "padding": lambda p, r, c, g, ids, m: {
        "token_rewards": p.token_rewards / m.shape[1],
        "lost": p.lost / m.shape[1],
    },
    "dtype": lambda p, *_: {"token_rewards": p.token_rewards.half()},
    "finite": lambda p, *_: {"token_rewards": p.token_rewards / 0},
}


def test_the_promises_have_teeth(subtests):
    for complaint in BROKEN:
        with subtests.test(complaint=complaint), pytest.raises(AssertionError, match=complaint):
            check_placement(changed(BROKEN[complaint]))
