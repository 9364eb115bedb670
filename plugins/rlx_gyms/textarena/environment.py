"""The environment `textarena`: a game, played alone or against an opponent."""

import pickle
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.plugin import Action, Episode, Reply, StatefulEnvironment
from rlx_gyms.libraries import NeedsLibrary
from rlx_gyms.textarena.games import is_invalid, mute, open_game, read_observation

__all__ = ["TextArenaEnvironment"]

_PLAYER, _OPPONENT = 0, 1

_LONGEST = 1000
"""Characters of a move that a game reads: Python refuses to read a number of 5000 digits."""


def _build_guess_episode(
    name: str, *turns: str, kinds: tuple[str, ...], done: bool = True
) -> Episode:
    """A game with the secret number 8."""
    problem = {"id": "GuessTheNumber-v0", "config": "{}", "players": 1, "seed": 3}
    return Episode(name=name, problem=problem, turns=turns, kinds=kinds, done=done)


class TextArenaEnvironment(NeedsLibrary, StatefulEnvironment):
    """Plays the game that the task `textarena` names. A turn is a move, with or without brackets.

    `info` holds `return`, the reward that the game ends with (0 before), `won`, whether that is 1,
    and `valid`, whether the move was. With `opponent` the model is the first of two players.
    """

    library: ClassVar[str] = "textarena"

    kinds: ClassVar[tuple[str, ...]] = ("move", "invalid")
    examples: ClassVar[tuple[Episode, ...]] = (
        _build_guess_episode("gold", "[8]", kinds=("move",)),
        _build_guess_episode("hint", "<answer>1</answer>", "8", kinds=("move", "move")),
        _build_guess_episode("hostile", "[" * 10_000, "", kinds=("invalid", "invalid")),
    )

    opponent: tuple[str, ...] = ()
    """Moves of the other player, such as `["[0]", "[1]"]`: in each turn the first valid one in a
    random order. Empty for games of one player."""
    span: str = "answer"
    """The span with the move; without it the whole turn is the move."""

    def open(self, problem: Mapping[str, Any], seed: int) -> Any:
        """Opens the problem's game; what it has shown is in the prompt."""
        if (problem["players"] == 1) == bool(self.opponent):
            raise ValueError(
                f"the task has `players: {problem['players']}`: the environment's `opponent` lists "
                "the moves of the second player, and only of a second"
            )
        game = open_game(problem["id"], problem["config"], problem["players"], problem["seed"])
        read_observation(game, _PLAYER)
        return game

    def play(self, game: Any, action: Action) -> Reply:
        """Makes one move, and the opponent's after it."""
        text = action.spans.get(self.span, action.text).strip()[:_LONGEST]
        move = text if "[" in text else f"[{text}]"
        with mute():
            done, _ = game.step(move)
            valid = not is_invalid(game, _PLAYER)
            while not done and game.state.current_player_id != _PLAYER:
                done = self._answer(game)
        total = _get_return(game)
        return Reply(
            kind="move" if valid else "invalid",
            observation=read_observation(game, _PLAYER),
            done=bool(done),
            info={"return": total, "won": bool(done) and total >= 1.0, "valid": valid},
        )

    def _answer(self, game: Any) -> bool:
        """Makes the opponent's move, the first valid one; returns whether the game has ended."""
        for move in random.sample(self.opponent, len(self.opponent)):
            trial = pickle.loads(pickle.dumps(game))
            trial.step(move)
            if not is_invalid(trial, _OPPONENT):
                break
        done, _ = game.step(move)
        return bool(done)


def _get_return(game: Any) -> float:
    """The player's reward; 0 before the end, and where a game sets the reason in its place."""
    value = (game.state.rewards or {}).get(_PLAYER, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
