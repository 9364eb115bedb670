"""TextArena through rlx: every game of one player that needs no download, and a game of two."""

import re

import pytest
from gyms_installed import need_library
from pydantic import ValidationError
from rows import each_row

from rlx.plugin import Action
from rlx.rollout import LocalHost
from rlx.testing.rewards import HOSTILE_TEXTS
from rlx_gyms.textarena import TextArenaEnvironment, TextArenaTask

need_library("textarena")

SINGLE_PLAYER = {
    "2048-v0": "[Left]",
    "Bandit-v0": "[red]",
    "Blackjack-v0": "[Stand]",
    "Countdown-v0": "[0 1 +]",
    "Crosswords-v0": "[6 7 r]",
    "Cryptarithm-v0": "[S 9]",
    "FifteenPuzzle-v0": "[up]",
    "FrozenLake-v0": "[right]",
    "GuessTheNumber-v0": "[1]",
    "LightsOut-v0": "[0 0]",
    "LogicPuzzle-v0": "[gasoline bob X]",
    "Mastermind-v0": "[1 2 3 4]",
    "Minesweeper-v0": "[3 2]",
    "PegJump-v0": "[14 5]",
    "RushHour-v0": "[H-]",
    "Secretary-v0": "[continue]",
    "Set-v0": "[1, 2, 3]",
    "Slitherlink-v0": "[h 0 0]",
    "Sokoban-v0": "[up]",
    "Sudoku-v0-very-easy": "[2 3 9]",
    "ThreeCardMonte-v0": "[0]",
    "TowerOfHanoi-v0": "[A C]",
}
"""The games of one player that need no download, each with a first move that is valid."""


@pytest.fixture(scope="module")
def problems():
    return {game: TextArenaTask(id=game).problem("train", 0, 0) for game in SINGLE_PLAYER}


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


def test_every_game_repeats_itself_and_answers(problems):
    for game, problem in problems.items():
        turns = (SINGLE_PLAYER[game], "nonsense", "[0 0]", "[up]")
        first = play(TextArenaEnvironment(), problem, turns)
        assert first == play(TextArenaEnvironment(), problem, turns), game
        assert any(observation for _, observation, *_ in first) or first[-1][2], game


def test_hostile_moves_are_scored_or_cut_off_in_every_game(problems):
    texts = [*HOSTILE_TEXTS.values(), "[" * 5000, "[" + "9" * 5000 + "]", "[-1 -1]", "[9999999999]"]
    for game, problem in problems.items():
        host = LocalHost(TextArenaEnvironment())
        (state,) = host.reset([(problem.fields, 0)])
        steps = host.step([(state, Action(text=text)) for text in texts])
        again = [(step.state, Action(text=texts[0], number=2)) for step in steps if not step.done]
        for step in (*steps, *host.step(again)):
            assert 0 <= abs(step.info["return"]) <= 1, game
            assert not step.info["won"], game
        for text, step in zip(texts, steps, strict=True):
            assert step.info["cut"] == (len(text.strip()) > 1000)


def test_a_second_player_draws_valid_moves():
    cells = tuple(f"[{cell}]" for cell in range(9))
    task = TextArenaTask(id="TicTacToe-v0", players=2)
    problem = task.problem("train", 0, 0)
    random = TextArenaEnvironment(opponent=cells)
    results = [play(random, problem, cells, seed) for seed in range(8)]
    assert len({str(steps) for steps in results}) > 3
    for steps in results:
        assert "Player 1 placed their symbol" in steps[0][1]
        assert steps[-1][2]
        assert {info["return"] for *_, info in steps[:-1]} <= {0.0}
        assert steps[-1][3]["return"] in (-1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="`opponent` lists"):
        play(TextArenaEnvironment(), problem, cells)


@each_row(
    ("options", "says"),
    [
        ({"id": "GuessTheNumbers-v0"}, "did you mean 'GuessTheNumber-v0'"),
        ({"id": "GuessTheNumber-v0", "config": {"max": 3}}, "unexpected keyword argument 'max'"),
        ({"id": "ScorableGames-v0", "players": 2}, "cannot open 'ScorableGames-v0': FileNotFound"),
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


def play_both(task, environment, moves):
    """The texts that each player has read, and the last `info` of each, when all moves are made."""
    host, problem = LocalHost(environment), task.problem("train", 0, 0)
    (state,) = host.reset([(problem.fields, 0)])
    read, infos, turns, player = ([problem.prompt], []), [{}, {}], [0, 0], 0
    for move in moves:
        turns[player] += 1
        action = Action(text=move, number=turns[player], player=player)
        (step,) = host.step([(state, action)])
        infos[player] = dict(step.info)
        infos[1 - player] |= step.opponent_info
        if step.done:
            break
        state, player = step.state, step.player
        read[player].append(step.observation)
    return ["".join(texts) for texts in read], infos, step.done


def test_a_task_without_moves_has_no_script():
    with pytest.raises(NotImplementedError, match="moves"):
        TextArenaTask().lesson(0, 0)


def test_in_self_play_the_game_says_whose_turn_it_is_and_who_has_won():
    task = TextArenaTask(id="Nim-v0", config={"piles": [2, 1]}, players=2, prompt="Nim\n")
    environment = TextArenaEnvironment(opponent=("[0 1]",), second_prompt="You are second.")
    moves = ("0 1", "7 7", "1 1", "0 1")  # the second player repeats its invalid move
    texts, infos, done = play_both(task, environment, moves)
    assert done
    assert [info["won"] for info in infos] == [True, False]
    assert [info["return"] for info in infos] == [1.0, -1.0]
    assert texts[0].startswith("Nim\n") and "Player 1 removes 1 from pile 1" in texts[0]
    assert texts[1].startswith("You are second.\n") and "Welcome" not in texts[1]
    assert "Player 0 removes 1 from pile 0" in texts[1]
    plain = TextArenaEnvironment(opponent=("[0 1]",))
    assert "Welcome to Nim, Player 1!" in play_both(task, plain, moves)[0][1]
    # The second player gives up the game by two invalid moves in a row.
    _, infos, done = play_both(task, environment, ("0 1", "7 7", "7 7"))
    assert done and [info["return"] for info in infos] == [1.0, -1.0]


def test_in_self_play_no_player_sees_the_other_s_card():
    task = TextArenaTask(id="KuhnPoker-v0", players=2)
    texts, _, _ = play_both(task, TextArenaEnvironment(opponent=("[check]",)), ["[check]", "[bet]"])
    cards = [set(re.findall(r"card is: '([JQK])'", text)) for text in texts]
    assert all(len(card) == 1 for card in cards) and cards[0] != cards[1]
    # The library's player 1 begins this game, which is the first player here.
    assert "You are Player 1" in texts[0] and "You are Player 0" in texts[1]
    assert "[bet]" in texts[0] and "submitted move: '[check]'" in texts[1]


def test_a_model_begins_where_the_game_lets_the_second_player_begin():
    problem = TextArenaTask(id="KuhnPoker-v0", players=2).problem("train", 0, 0)
    opponent = TextArenaEnvironment(opponent=("[call]", "[check]"))
    ((kind, observation, _, _), *_) = play(opponent, problem, ["[bet]"])
    assert kind == "move" and "Player 0's" in observation
