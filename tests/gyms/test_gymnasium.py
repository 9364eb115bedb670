"""Gymnasium through rlx: its values are exact, and the environment attains them."""

import numpy as np
import pytest
from gyms_installed import need_library
from pydantic import ValidationError
from rows import each_row

from rlx.plugin import Action
from rlx.rollout import LocalHost
from rlx_gyms.gymnasium import (
    GymnasiumEnvironment,
    GymnasiumTask,
    compute_action_values,
    format_observation,
    list_action_names,
    open_game,
)

need_library("gymnasium")

ACTIONS = ("left", "down", "right", "up")


def test_frozen_lake_has_its_known_optimum():
    """14/17 for the slippery 4 × 4 lake without a limit of turns."""
    values = compute_action_values(open_game("FrozenLake-v1", "{}").P, 4000)
    assert max(values[0]) == pytest.approx(14 / 17, abs=1e-6)
    dry = compute_action_values(open_game("FrozenLake-v1", '{"is_slippery": false}').P, 6)
    assert max(dry[0]) == 1.0
    shorter = compute_action_values(open_game("FrozenLake-v1", '{"is_slippery": false}').P, 5)
    assert max(shorter[0]) == 0.0


def test_the_best_policy_earns_its_value_in_the_environment():
    turns, episodes = 12, 200
    host = LocalHost(GymnasiumEnvironment())
    tables = [
        compute_action_values(open_game("FrozenLake-v1", "{}").P, left) for left in range(turns + 1)
    ]
    task = GymnasiumTask()
    problem = next(p for i in range(99) if (p := task.problem("train", i, 0)).prompt == "8\n")
    value, returns = max(tables[turns][8]), []
    for seed in range(episodes):
        (state,), place = host.reset([(problem.fields, seed)]), 8
        for number in range(1, turns + 1):
            row = tables[turns - number + 1][place]
            action = Action(
                text=ACTIONS[row.index(max(row))], number=number, turns_left=turns - number
            )
            (step,) = host.step([(state, action)])
            assert step.info["optimal"]
            if number == 1:
                assert step.info["value"] == value
            if step.done:
                break
            state, place = step.state, int(step.observation)
        returns.append(step.info["return"])
    error = (value * (1 - value) / episodes) ** 0.5
    assert abs(sum(returns) / episodes - value) < 4 * error


@each_row(
    ("options", "says"),
    [
        ({"id": "FrozenLake-v11"}, "did you mean 'FrozenLake-v1'"),
        ({"id": "FrozenLake-v1", "config": {"slippery": True}}, "slippery"),
        ({"id": "Pendulum-v1"}, "not discrete"),
    ],
)
def test_environments_that_cannot_be_played_are_named(options, says):
    with pytest.raises(ValidationError, match=says):
        GymnasiumTask(**options)


@each_row("id", ["Blackjack-v1", "Taxi-v4", "CartPole-v1", "CliffWalking-v1"])
def test_other_environments_play_to_their_end(id):
    task, host = GymnasiumTask(id=id), LocalHost(GymnasiumEnvironment())
    names = list_action_names(id, int(open_game(id, "{}").action_space.n))
    problem = task.problem("test", 0, 0)
    total, (state,) = 0.0, host.reset([(problem.fields, 1)])
    for number in range(1, 13):
        text = names[number % len(names)]
        (step,) = host.step([(state, Action(text=text, number=number))])
        assert step.kind == "move"
        total += step.info["reward"]
        assert step.info["return"] == pytest.approx(total)
        if step.done:
            break
        assert step.observation.strip()
        state = step.state


def test_every_part_of_an_observation_is_shown():
    shown = format_observation({"where": (1, np.arange(2.0)), "at": np.zeros(1200)})
    assert shown == "at " + "0 " * 1200 + "where 1 0 1"
