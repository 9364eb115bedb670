"""TextArena through rlx: every game of one player that needs no download, and a game of two."""

import pytest
from gyms_installed import need_library
from pydantic import ValidationError

from rlx.plugin import Action, Step
from rlx.rollout import LocalHost
from rlx.testing import check_environment
from rlx.testing.rewards import HOSTILE_TEXTS
from rlx_gyms.textarena import TextArenaEnvironment, TextArenaTask

need_library("textarena")

GAMES = (
    "2048-v0",
    "Bandit-v0",
    "Blackjack-v0",
    "Countdown-v0",
    "Crosswords-v0",
    "Cryptarithm-v0",
    "FifteenPuzzle-v0",
    "FrozenLake-v0",
    "GuessTheNumber-v0",
    "LightsOut-v0",
    "LogicPuzzle-v0",
    "Mastermind-v0",
    "Minesweeper-v0",
    "PegJump-v0",
    "RushHour-v0",
    "Secretary-v0",
    "Set-v0",
    "Slitherlink-v0",
    "Sokoban-v0",
    "Sudoku-v0-very-easy",
    "ThreeCardMonte-v0",
    "TowerOfHanoi-v0",
)


@pytest.fixture(scope="module")
def problems():
    return {game: TextArenaTask(id=game).problem("train", 0, 0) for game in GAMES}


def play(environment, problem, turns, seed=0):
    host, steps = LocalHost(environment), []
    (state,) = host.reset([(problem.fields, seed)])
    for number, text in enumerate(turns, 1):
        (step,) = host.step([(state, Action(text=text, number=number))])
        steps.append((step.kind, step.observation, step.done, step.info))
        if step.done:
            break
        state = step.state
    return steps


def test_every_game_plays_and_repeats_itself(problems):
    turns = ("[1]", "nonsense", "[0 0]", "[up]")
    for game, problem in problems.items():
        first = play(TextArenaEnvironment(), problem, turns)
        assert first == play(TextArenaEnvironment(), problem, turns), game
        assert any(observation for _, observation, *_ in first) or first[-1][2], game


def test_every_game_bears_hostile_text(problems):
    texts = [*HOSTILE_TEXTS.values(), "[" * 5000, "[9999999999999999]"]
    for game, problem in problems.items():
        host = LocalHost(TextArenaEnvironment())
        (state,) = host.reset([(problem.fields, 0)])
        for step in host.step([(state, Action(text=text)) for text in texts]):
            assert isinstance(step, Step), game
            assert 0 <= abs(step.info["return"]) <= 1, game


def test_some_games_keep_the_promises(problems):
    check_environment(TextArenaEnvironment(), [problems["Minesweeper-v0"].fields])


def test_a_second_player_draws_valid_moves():
    cells = tuple(f"[{cell}]" for cell in range(9))
    task = TextArenaTask(id="TicTacToe-v0", players=2)
    problem = task.problem("train", 0, 0)
    results = [play(TextArenaEnvironment(opponent=cells), problem, cells, s) for s in range(8)]
    assert len({str(steps) for steps in results}) > 3
    for steps in results:
        assert "Player 1 placed their symbol" in steps[0][1]
        assert steps[-1][2]
        assert {info["return"] for *_, info in steps[:-1]} <= {0.0}
        assert steps[-1][3]["return"] in (-1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="`opponent` lists"):
        play(TextArenaEnvironment(), problem, cells)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "GuessTheNumbers-v0"}, "did you mean 'GuessTheNumber-v0'"),
        ({"id": "GuessTheNumber-v0", "config": {"max": 3}}, "unexpected keyword argument 'max'"),
    ],
)
def test_games_that_cannot_be_opened_are_named(options, says):
    with pytest.raises(ValidationError, match=says):
        TextArenaTask(**options)


def test_beginnings_are_split():
    hidden = TextArenaTask(id="GuessTheNumber-v0")
    shown = TextArenaTask(id="LightsOut-v0")
    for task, what in ((hidden, "id"), (shown, "prompt")):
        train, test = (
            {getattr(task.problem(split, index, 0), what) for index in range(30)}
            for split in ("train", "test")
        )
        assert not train & test
