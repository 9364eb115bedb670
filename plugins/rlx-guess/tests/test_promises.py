"""Every plugin of this distribution keeps the promises of its kind, and the game its rules."""

import pytest
from rlx_guess.game import HIGHER, LOWER, UNCLEAR, Game
from rlx_guess.rewards import score_found_secret, score_sensible_guess
from rlx_guess.task import GuessTask

from rlx.plugin import Action
from rlx.testing import check_environment, check_reward, check_task, environment_checks

PROBLEM = {"low": 1, "high": 12, "secret": 7}


@pytest.mark.parametrize("check", environment_checks(), ids=str)
def test_game(check):
    check(Game)


def test_the_others():
    check_environment(Game(patience=5))
    check_task(GuessTask)
    check_task(GuessTask(largest=20, size=4))
    for reward in (score_found_secret, score_sensible_guess):
        check_reward(reward)


def played(game, *guesses):
    state, steps = game.reset(PROBLEM, seed=0), []
    for number, guess in enumerate(guesses, start=1):
        action = Action(text=f"<answer>{guess}</answer>", spans={"answer": guess}, number=number)
        steps.append(game.step(state, action))
        state = steps[-1].state
    return steps


def test_a_game():
    high, again, low, end = played(Game(), "9", "9", "2", "7")
    assert [s.observation for s in (high, again, low)] == [LOWER, LOWER, HIGHER]
    assert [s.info["sensible"] for s in (high, again, low, end)] == [True, False, True, True]
    assert [s.done for s in (high, again, low, end)] == [False, False, False, True]
    assert end.info["found"]


def test_patience_ends():
    first, second = played(Game(patience=2), "seven", "")
    assert (first.kind, first.observation, first.done) == ("unclear", UNCLEAR, False)
    assert second.done


def test_halving_finds_every_number():
    task, game = GuessTask(halving=1.0), Game()
    problem = next(p for i in range(99) if len(_bounds(p := task.lesson(i, 0))) == 12)
    for secret in _bounds(problem):
        state, turns, told = game.reset({**problem.fields, "secret": secret}, 0), [], []
        for number in range(1, 5):
            turns.append(task.act(problem, turns, told, seed=1))
            guess = turns[-1][len("<answer>") : -len("</answer>")]
            step = game.step(state, Action(text=turns[-1], spans={"answer": guess}, number=number))
            told.append(step.observation)
            state = step.state
            if step.done:
                break
        assert step.info["found"]


def _bounds(problem):
    return range(problem.fields["low"], problem.fields["high"] + 1)
