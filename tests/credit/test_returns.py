"""Credit along tokens: worked examples, plain loops as oracles, and how the estimators relate."""

import math

import bound
import hypothesis.strategies as st
import pytest
import torch
from golden_records import build_credit_inputs
from hypothesis import given
from rows import each_row

from rlx.credit import compute_gae_advantages, estimate_vineppo, whiten_values
from rlx.errors import ShapeError
from rlx.spec import VinePpo

GARBAGE = (math.nan, math.inf, -math.inf, 7.0)

factors = st.sampled_from([0.0, 0.3, 0.95, 1.0])
environments = st.sampled_from(["skip", "literal"])
sizes = st.tuples(st.integers(1, 4), st.integers(1, 150))
seeds = st.integers(0, 2**32)


def assert_close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def rows(*streams):
    return [torch.tensor([stream], dtype=torch.float64) for stream in streams]


def batch(sizes, seed, dtype=torch.float64):
    """Rewards, values, mask and turn ids: a prompt, turns with gaps in them, padding; or nothing.

    Outside the mask stands garbage.
    """
    rng = torch.Generator().manual_seed(seed)
    draw = {"generator": rng, "dtype": dtype}
    at, width = torch.arange(sizes[1]), sizes[1]
    ends = torch.randint(0, width + 1, (2, sizes[0], 1), generator=rng).sort(dim=0).values
    # In some rows every token of the response learns, in others about half of them.
    dense = torch.rand(sizes[0], 1, generator=rng) < 0.3
    mask = (at >= ends[0]) & (at < ends[1]) & (dense | (torch.rand(sizes, generator=rng) < 0.6))
    turns = (torch.rand(sizes, generator=rng) < 0.2).cumsum(dim=1) + 1
    garbage = torch.tensor(GARBAGE, dtype=dtype)[torch.randint(0, 4, sizes, generator=rng)]
    rewards, values = (torch.where(mask, torch.randn(sizes, **draw), garbage) for _ in range(2))
    return rewards, values, mask, torch.where(mask, turns, -1)


def tidy(rewards, values, mask):
    """For the literal recursion, which reads what does not learn: finite numbers everywhere."""
    return rewards.nan_to_num(0.5, 0.25, -0.25), values.nan_to_num(0.5, 0.25, -0.25), mask


def steps_of(row, environment="skip"):
    """Positions of the time steps, first to last."""
    learning = [t for t, learns in enumerate(row) if learns]
    if environment == "skip" or not learning:
        return learning
    return list(range(learning[0], learning[-1] + 1))


def gae_oracle(rewards, values, mask, gamma, lam, environment="skip"):
    advantages = torch.zeros_like(rewards)
    for i, row in enumerate(mask.tolist()):
        r, v = rewards[i].tolist(), values[i].tolist()
        after = next_value = 0.0
        for t in reversed(steps_of(row, environment)):
            after = r[t] + gamma * next_value - v[t] + gamma * lam * after
            next_value = v[t]
            advantages[i, t] = after if row[t] else 0.0
    return advantages


def turn_level_oracle(rewards, values, mask, turns, gamma, lam, gamma_high, lam_high):
    advantages = torch.zeros_like(rewards)
    for i, row in enumerate(mask.tolist()):
        r, v, ids = rewards[i].tolist(), values[i].tolist(), turns[i].tolist()
        tokens = {turn: [] for turn in ids}
        for t in steps_of(row):
            tokens[ids[t]].append(t)
        later, on_the_way, next_value = 0.0, 0.0, 0.0
        for turn in sorted((turn for turn in tokens if tokens[turn]), reverse=True):
            *inner, end = tokens[turn]
            delta = r[end] + gamma_high * (on_the_way + next_value) - v[end]
            later = advantages[i, end] = delta + gamma_high * lam_high * later
            on_the_way, next_value = sum(r[t] for t in inner), v[end]
            after, ahead = float(later), v[end]
            for t in reversed(inner):
                after = r[t] + gamma * ahead - v[t] + gamma * lam * after
                ahead = v[t]
                advantages[i, t] = after
    return advantages


def gae(rewards, values, mask, *, gamma=1.0, lam=1.0, environment="skip"):
    return compute_gae_advantages(
        rewards, values, mask, gamma=gamma, lam=lam, environment=environment
    )


def turn_gae(rewards, values, mask, turns, **options):
    inputs = {"token_rewards": rewards, "values": values, "mask": mask, "turn_ids": turns}
    credit = bound.estimator("turn_level_gae", **options)(build_credit_inputs(inputs))
    return credit.advantages, credit.returns


def discounted_returns(rewards, mask, *, gamma):
    inputs = build_credit_inputs({"token_rewards": rewards, "mask": mask})
    return bound.estimator("reinforce_plus_plus", gamma=gamma, whiten=False)(inputs)


def vine(steps, values, scores):
    """The row's score is paid at its last step."""
    given = {"mc_values": values, "step_ids": steps, "mask": steps >= 0, "global_rewards": scores}
    return estimate_vineppo(build_credit_inputs(given), VinePpo())


def test_literal_and_skip_part_where_the_discount_is_not_one():
    rewards, values = rows([0, 0, 0, 1.0], [0.5, 0.4, 0.9, 0.3])
    mask = torch.tensor([[True, True, False, True]])
    skipped, _ = gae(rewards, values, mask, gamma=0.5, lam=0.0)
    literal, _ = gae(rewards, values, mask, gamma=0.5, lam=0.0, environment="literal")
    assert skipped[0].tolist() == pytest.approx([-0.3, -0.25, 0, 0.7])
    assert literal[0].tolist() == pytest.approx([-0.3, 0.05, 0, 0.7])


@given(sizes, seeds, factors, factors, environments)
def test_gae_agrees_with_a_plain_loop(sizes, seed, gamma, lam, environment):
    rewards, values, mask, _ = batch(sizes, seed)
    if environment == "literal":
        rewards, values, mask = tidy(rewards, values, mask)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, environment=environment)
    assert_close(advantages, gae_oracle(rewards, values, mask, gamma, lam, environment))
    assert_close(returns, torch.where(mask, advantages + values, 0.0))


@each_row("environment", ["skip", "literal"])
@each_row("decay", [0.0, 1e-30, 0.95, 0.9999, 1.0])
def test_gae_of_long_rows_in_float32(decay, environment):
    """More rows than are worked on at once, and discounts whose powers are no numbers any more."""
    rewards, values, mask = tidy(*batch((70, 4096), 0, torch.float32)[:3])
    actual, returns = gae(rewards, values, mask, lam=decay, environment=environment)
    assert actual.dtype == returns.dtype == torch.float32
    expected = gae_oracle(rewards.double(), values.double(), mask, 1.0, decay, environment)
    assert_close(actual.double(), expected, tolerance=3e-4)


@given(sizes, seeds, factors, factors, factors, factors)
def test_turn_level_gae_agrees_with_a_plain_loop(sizes, seed, gamma, lam, gamma_high, lam_high):
    x = batch(sizes, seed)
    options = {"gamma": gamma, "lam": lam, "gamma_high": gamma_high, "lam_high": lam_high}
    advantages, returns = turn_gae(*x, **options)
    assert_close(advantages, turn_level_oracle(*x, **options))
    assert_close(returns, torch.where(x[2], advantages + x[1], 0.0))


@given(sizes, seeds)
def test_whiten_agrees_with_a_plain_loop(sizes, seed):
    values, _, mask, _ = batch(sizes, seed)
    chosen = values[mask].tolist()
    expected = torch.zeros_like(values)
    if len(chosen) > 1:
        mean = sum(chosen) / len(chosen)
        variance = sum((x - mean) ** 2 for x in chosen) / (len(chosen) - 1)
        expected[mask] = (values[mask] - mean) / math.sqrt(variance + 1e-8)
    assert_close(whiten_values(values, mask), expected)


@given(sizes, seeds, st.integers(1, 5))
def test_vine_agrees_with_a_plain_loop_and_adds_up(sizes, seed, steps):
    rng = torch.Generator().manual_seed(seed)
    step_ids = torch.randint(-1, steps, sizes, generator=rng)
    values = torch.randn(sizes[0], steps + 1, generator=rng, dtype=torch.float64)
    scores = torch.randn(sizes[0], generator=rng, dtype=torch.float64)
    expected = torch.zeros(sizes, dtype=torch.float64)
    for i, row in enumerate(step_ids.tolist()):
        for t, s in enumerate(row):
            if s >= 0:
                paid = scores[i] if s == max(row) else 0.0
                expected[i, t] = paid + values[i, s + 1] - values[i, s]
    assert_close(vine(step_ids, values, scores), expected)
    one_token_each = torch.arange(steps).expand(sizes[0], -1)
    telescoped = scores + values[:, -1] - values[:, 0]
    assert_close(vine(one_token_each, values, scores).sum(dim=1), telescoped)


@given(sizes, seeds, factors)
def test_gae_with_lambda_1_is_the_discounted_return_less_the_value(sizes, seed, gamma):
    rewards, values, mask, _ = batch(sizes, seed)
    advantages, returns = gae(rewards, values, mask, gamma=gamma)
    expected = discounted_returns(rewards, mask, gamma=gamma)
    assert_close(returns, expected)
    assert_close(advantages, torch.where(mask, expected - values, 0.0))


@given(st.floats(-10, 10, width=32), st.integers(0, 64))
def test_equal_values_whiten_to_exact_zeros(value, size):
    values = torch.full((1, 65), math.nan)
    values[0, :size] = value
    mask = torch.arange(65)[None] < size
    assert whiten_values(values, mask).tolist() == [[0.0] * 65]


def test_a_nan_that_learns_is_not_hidden():
    values = torch.tensor([[1.0, math.nan, 3.0]])
    assert whiten_values(values, torch.ones(1, 3, dtype=torch.bool)).isnan().all()


def test_a_step_without_a_value_is_refused():
    steps, values = torch.tensor([[0, 1, 3]]), torch.zeros(1, 4)
    with pytest.raises(ShapeError, match="names step 3, mc_values has 3 steps"):
        vine(steps, values, torch.ones(1))


def otb(rewards, mask, chosen, collisions, ids, **options):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    given = {
        "token_rewards": rewards,
        "mask": torch.tensor(mask, dtype=torch.bool),
        "old_logprobs": torch.tensor(chosen, dtype=torch.float64).log(),
        "collision_probs": torch.tensor(collisions, dtype=torch.float64),
        "group_ids": torch.tensor(ids),
    }
    return bound.estimator("optimal_token_baseline", **options)(build_credit_inputs(given))


unit = st.floats(0.05, 0.95)
paths = st.lists(
    st.tuples(
        st.lists(st.tuples(st.floats(-1, 1), st.booleans(), unit, unit), min_size=4, max_size=4),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=5,
)


@given(paths)
def test_the_optimal_baseline_weighs_returns_of_a_step_by_the_variance_of_their_paths(rows):
    steps = [[(r, p, max(q, p * p)) for r, m, p, q in row if m] for row, _ in rows]
    ids = [group for _, group in rows]
    columns = [[[token[k] for token in row] for row, _ in rows] for k in range(4)]
    collisions = [
        [max(q, p * p) for p, q in zip(*both, strict=True)]
        for both in zip(columns[2], columns[3], strict=True)
    ]
    found = otb(columns[0], columns[1], columns[2], collisions, ids)
    for b, own in enumerate(steps):
        place = [t for t, m in enumerate(columns[1][b]) if m]
        for t in range(len(own)):
            peers = [o for o, g in zip(steps, ids, strict=True) if g == ids[b] and len(o) > t]
            returns = [sum(r for r, *_ in o[t:]) for o in peers]
            energy = [sum(1 - 2 * p + q for _, p, q in o[: t + 1]) for o in peers]
            expected = 0.0
            if max(returns) - min(returns) > 1e-12:
                baseline = sum(map(math.prod, zip(returns, energy, strict=True))) / sum(energy)
                expected = sum(r for r, *_ in own[t:]) - baseline
            assert found[b, place[t]].item() == pytest.approx(expected, abs=1e-6)


def test_equal_returns_have_no_advantage_and_a_step_of_one_row_its_return_if_asked_for():
    mask = [[1, 1, 0], [1, 1, 1], [0, 1, 0]]
    rewards = [[0, 0.7, 0], [0, 0, 0.7], [0, 0.7, 0]]
    halves = [[0.5] * 3] * 3
    assert (otb(rewards, mask, halves, halves, [0, 0, 0]) == 0).all()
    raw = otb(rewards, mask, halves, halves, [0, 0, 0], singleton="raw")
    assert raw.tolist() == [[0, 0, 0], [0, 0, 0.7], [0, 0, 0]]
