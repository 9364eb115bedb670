"""Estimators over turns, states and trees: worked examples, plain loops as oracles, relations."""

import math
from functools import partial
from statistics import mean

import bound
import hypothesis.strategies as st
import pytest
import torch
from golden_records import build_credit_inputs
from hypothesis import given
from rows import each_row

from rlx.credit.grpo import compute_step_returns

close = partial(pytest.approx, rel=1e-9, abs=1e-9)
sixteenths = st.integers(-32, 32).map(lambda n: n / 16)


# A batch as plain Python: a turn that was not rewarded is None, one that was not taken has no
# state; tokens may name turns that do not exist.


@st.composite
def batches(draw):
    turns, tokens = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    row = st.fixed_dictionaries(
        {
            "turns": st.lists(st.none() | sixteenths, min_size=turns, max_size=turns),
            "states": st.lists(st.sampled_from([-1, 0, 0, 10**15]), min_size=turns, max_size=turns),
            "outcome": sixteenths,
            "group": st.sampled_from([-4, 2, 900]),
            "tree": st.sampled_from([0, 1]),
            "ids": st.lists(st.integers(-1, 4), min_size=tokens, max_size=tokens),
            "mask": st.lists(st.booleans(), min_size=tokens, max_size=tokens),
        }
    )
    return draw(st.lists(row, min_size=1, max_size=8))


def tensors(batch, dtype=torch.float64):
    """Arguments by name. The reward of a turn that was not rewarded is NaN."""
    grid = {
        "turn_rewards": [[math.nan if r is None else r for r in row["turns"]] for row in batch],
        "turn_present": [[r is not None for r in row["turns"]] for row in batch],
        "global_rewards": [row["outcome"] for row in batch],
        "state_ids": [row["states"] for row in batch],
        "turn_ids": [row["ids"] for row in batch],
        "mask": [row["mask"] for row in batch],
        "group_ids": [row["group"] for row in batch],
        "tree_ids": [row["tree"] for row in batch],
    }
    kinds = {"turn_rewards": dtype, "global_rewards": dtype, "turn_present": bool, "mask": bool}
    return {k: torch.tensor(v, dtype=kinds.get(k, torch.int64)) for k, v in grid.items()}


def estimate(name, batch, dtype=torch.float64, **options):
    return bound.estimator(name, **options)(build_credit_inputs(tensors(batch, dtype)))


multiturn = partial(estimate, "multiturn_grpo")
first_turn = partial(estimate, "mt_grpo")
in_states = partial(estimate, "gigpo", gamma=0.5)


def normalised(value, group, *, normalize="std", ddof=1, eps=1e-6, singleton="zero"):
    """One value among those of its group."""
    if len(group) == 1 and singleton == "raw":
        return value / (1 + eps) if normalize == "std" else value
    if max(group) == min(group):
        return 0.0
    centre = mean(group)
    sigma = math.sqrt(sum((x - centre) ** 2 for x in group) / (len(group) - ddof))
    return (value - centre) / (sigma + eps if normalize == "std" else 1)


def of_prompt(batch, row):
    return [other for other in batch if other["group"] == row["group"]]


def spread(batch, on_token):
    """[B, T] of what a token of turn k learns, for tokens that learn and have a turn."""
    return [
        [
            on_token(row, k) if k > 0 and learns else 0.0
            for k, learns in zip(row["ids"], row["mask"], strict=True)
        ]
        for row in batch
    ]


def rewarded(row, k):
    return k <= len(row["turns"]) and row["turns"][k - 1] is not None


def plain_multiturn(batch, *, statistics, turn_weight, **how):
    def on_token(row, k):
        outcomes = [other["outcome"] for other in of_prompt(batch, row)]
        total = normalised(row["outcome"], outcomes, **how)
        if rewarded(row, k):
            group = [
                reward
                for other in of_prompt(batch, row)
                for number, reward in enumerate(other["turns"], start=1)
                if reward is not None and (statistics == "pooled" or number == k)
            ]
            total += turn_weight * normalised(row["turns"][k - 1], group, **how)
        return total

    return spread(batch, on_token)


def later_and_outcome(row):
    return row["outcome"] + sum(reward or 0.0 for reward in row["turns"][1:])


def plain_first_turn(batch, *, turn_coef, **how):
    def on_token(row, k):
        outcomes = [later_and_outcome(other) for other in of_prompt(batch, row)]
        total = normalised(later_and_outcome(row), outcomes, **how)
        if k == 1 and rewarded(row, 1):
            first = [other["turns"][0] for other in of_prompt(batch, row) if rewarded(other, 1)]
            total += turn_coef * normalised(row["turns"][0], first, **how)
        return total

    return spread(batch, on_token)


def plain_returns(row, gamma):
    rewards = [reward or 0.0 for reward in row["turns"]]
    taken = [k for k, state in enumerate(row["states"]) if state >= 0]
    if taken:
        rewards[taken[-1]] += row["outcome"]
    running, returns = 0.0, []
    for reward in reversed(rewards):
        running = reward + gamma * running
        returns.insert(0, running)
    return returns


def episode(row):
    return row["outcome"] + sum(reward or 0.0 for reward in row["turns"])


def plain_gigpo(batch, *, omega, normalize, gamma=0.5, singleton="zero", **how):
    def on_token(row, k):
        outcomes = [episode(other) for other in of_prompt(batch, row)]
        total = normalised(episode(row), outcomes, normalize=normalize, singleton=singleton, **how)
        if k <= len(row["states"]) and row["states"][k - 1] >= 0:
            group = [
                earned
                for other in of_prompt(batch, row)
                for state, earned in zip(other["states"], plain_returns(other, gamma), strict=True)
                if state == row["states"][k - 1]
            ]
            own = plain_returns(row, gamma)[k - 1]
            total += omega * normalised(own, group, normalize=normalize, **how)
        return total

    return spread(batch, on_token)


conventions = {
    "ddof": st.sampled_from([0, 1]),
    "eps": st.sampled_from([1e-6, 1e-4]),
    "singleton": st.sampled_from(["zero", "raw"]),
}
FAMILY = [
    pytest.param(
        multiturn,
        plain_multiturn,
        {"statistics": st.sampled_from(["pooled", "per_turn"]), "turn_weight": sixteenths},
        id="multiturn_grpo",
    ),
    pytest.param(first_turn, plain_first_turn, {"turn_coef": sixteenths}, id="mt_grpo"),
    pytest.param(
        in_states,
        plain_gigpo,
        {"omega": sixteenths, "normalize": st.sampled_from(["std", "center"])},
        id="gigpo",
    ),
]


@each_row(("estimator", "oracle", "own"), FAMILY)
@given(data=st.data(), batch=batches())
def test_agrees_with_a_plain_loop_on_ragged_batches_full_of_nan(
    estimator, oracle, own, data, batch
):
    options = data.draw(st.fixed_dictionaries({**conventions, **own}))
    actual = estimator(batch, **options).tolist()
    for got, expected in zip(actual, oracle(batch, **options), strict=True):
        assert got == close(expected)


def test_a_turn_whose_state_no_other_shares_adds_nothing():
    row = {"turns": [1.0], "outcome": 0.0, "group": 0, "tree": 0, "ids": [0, 1], "mask": [1, 1]}
    batch = [row | {"states": [0]}, row | {"states": [1], "turns": [0.5]}]
    for singleton in ("zero", "raw"):
        alone, none = (in_states(batch, omega=o, singleton=singleton) for o in (1.0, 0.0))
        assert alone.any() and torch.equal(alone, none)


def test_returns_of_a_long_rollout_neither_overflow_nor_drown():
    ones = torch.ones(1, 400)
    some = torch.ones(1, 400, dtype=torch.bool)
    returns = compute_step_returns(ones, torch.zeros(1), some, gamma=0.1)
    assert returns[0, [0, 200, 398, 399]].tolist() == pytest.approx([10 / 9, 10 / 9, 1.1, 1.0])


def leaves(scores, prompts, trees, **options):
    """`[B]` advantage of each leaf, from scores and ids; `trees` are numbered within a prompt."""
    groups = [f"{prompt} {tree}" for prompt, tree in zip(prompts, trees, strict=True)]
    inputs = build_credit_inputs(
        {
            "global_rewards": scores,
            "tree_ids": torch.tensor(prompts),
            "group_ids": groups,
            "levels": [1] * len(groups),
        }
    )
    return bound.estimator("tree_grpo", **options)(inputs)[:, 0]


@given(batches(), st.fixed_dictionaries(conventions), st.sampled_from(["std", "center"]))
def test_tree_grpo_agrees_with_a_plain_loop(batch, how, normalize):
    expected = []
    for row in batch:
        prompt = of_prompt(batch, row)
        both = [other["outcome"] for other in prompt]
        tree = [other["outcome"] for other in prompt if other["tree"] == row["tree"]]
        parts = [normalised(row["outcome"], g, normalize=normalize, **how) for g in (both, tree)]
        expected.append(sum(parts))
    scores, prompts, trees = zip(
        *((r["outcome"], r["group"], r["tree"]) for r in batch), strict=True
    )
    actual = leaves(list(scores), prompts, trees, normalize=normalize, **how)
    assert actual.tolist() == close(expected)


def test_rows_that_continue_the_prompt_are_compared_once():
    inputs = build_credit_inputs({"global_rewards": [1.0, 0.0, 0.5], "group_ids": [0, 0, 0]})
    assert torch.equal(bound.estimator("tree_grpo")(inputs), bound.estimator("grpo")(inputs))
