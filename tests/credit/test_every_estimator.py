"""The promises of estimators with other options than their defaults, which tests/testing asks of
all that is shipped, and proof that they have teeth."""

from dataclasses import replace

import bound
import pytest
import torch
from rows import each_row

from rlx.credit import spread_over_mask, total_scores
from rlx.discovery import load_plugin
from rlx.testing import check_estimator

grpo = bound.estimator("grpo")
SECOND_LEVELS = ("prompt_scale", "prompt_renorm", "ema_scale")
OTHERWISE = [
    ("gae", {"gamma": 0.9, "lam": 0.8, "whiten": True}),
    ("optimal_token_baseline", {"singleton": "raw"}),
    ("remax", {"returns": "to_go"}),
    ("gdpo", {"normalize": "leave_one_out", "renormalize": "tokens"}),
    ("gigpo", {"normalize": "std", "gamma": 0.5, "omega": 0.3}),
    ("gpg", {"alpha": "scores", "f_norm": 2.0}),
    ("grpo", {"enable_multiturn_advantage": True}),
    ("multiturn_grpo", {"statistics": "per_turn", "ddof": 0}),
    ("pass_at_k", {"normalize": "center"}),
    ("reinforce_plus_plus", {"gamma": 0.9, "whiten": False}),
    ("reinforce_plus_plus_baseline", {"whiten": False}),
    ("tree_grpo", {"normalize": "center"}),
    ("turn_level_gae", {"gamma": 0.9, "lam": 0.8, "gamma_high": 0.7, "lam_high": 0.6}),
    *(("two_level", {"second_level": how}) for how in SECOND_LEVELS),
]


@each_row(("name", "options"), OTHERWISE)
def test_they_keep_them_with_other_options(name, options):
    check_estimator(load_plugin("estimator", name)(**options))


def group_means(x, scores):
    same = (x.group_ids[:, None] == x.group_ids[None, :]).to(scores.dtype)
    return same @ scores / same.sum(dim=1)


def rounding(x):
    scores = total_scores(x)
    ids = x.group_ids
    centred = torch.stack([s - scores[ids == i].mean() for s, i in zip(scores, ids, strict=True)])
    return spread_over_mask(centred, x.mask)


def equal_sizes(x):
    """Takes rows to be dealt out in blocks of four, as `scores.view(-1, 4)` would."""
    blocks = torch.arange(len(x.mask)) // 4
    return grpo(replace(x, group_ids=blocks))


def names_of_groups(x):
    return grpo(x) * (1 + x.group_ids % 10)[:, None]


def by_turns_of_the_batch(x):
    return grpo(x) * x.turn_rewards.shape[1]


def in_place(x):
    x.turn_rewards.sub_(group_means(x, x.turn_rewards.mean(dim=1))[:, None])
    return grpo(x)


@each_row(
    ("broken", "complaint"),
    [
        (rounding, "exactly 0 in a group of equal rewards"),
        (equal_sizes, "exactly 0 in a group|order of rows"),
        (names_of_groups, "the ids of groups"),
        (by_turns_of_the_batch, "how many turns other rows have"),
        (in_place, "wrote into its input turn_rewards"),
        (lambda x: spread_over_mask(total_scores(x), x.mask), "exactly 0"),
    ],
)
def test_the_promises_that_placements_do_not_make_have_teeth(broken, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_estimator(broken)
