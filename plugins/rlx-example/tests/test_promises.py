"""Every plugin of this distribution keeps the promises of its kind."""

import pytest
import torch
from rlx_example.descriptors import LeaveOneOut, OneSpan
from rlx_example.rewards import Consensus, Distinct, few_errors
from rlx_example.tensors import leave_one_out

from rlx.testing import (
    check_estimator,
    check_mask,
    check_reward,
    example_inputs,
    reward_checks,
)


@pytest.mark.parametrize("check", reward_checks(), ids=str)
def test_distinct(check):
    check(Distinct)


@pytest.mark.parametrize("reward", [Consensus, few_errors, few_errors(key="faults", most=5)])
def test_rewards(reward):
    check_reward(reward)


def test_descriptors():
    check_estimator(LeaveOneOut(scale=0.5))
    check_mask(OneSpan(span="think"))


def test_leaving_one_out_is_what_it_says():
    inputs = example_inputs(3)
    advantages = leave_one_out(inputs, LeaveOneOut())
    turns = inputs.turn_present.sum(dim=1).clamp(min=1)
    scores = inputs.turn_rewards.sum(dim=1) / turns + inputs.global_rewards
    for row in inputs.mask.any(dim=1).nonzero().flatten().tolist():
        others = inputs.group_ids == inputs.group_ids[row]
        others[row] = False
        wanted = scores[row] - scores[others].mean() if others.any() else torch.tensor(0.0)
        torch.testing.assert_close(advantages[row][inputs.mask[row]].unique(), wanted[None])
