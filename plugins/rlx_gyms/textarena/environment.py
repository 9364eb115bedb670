"""The environment `textarena`: a game, played alone or against an opponent."""

import pickle
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from rlx.plugin import Action, Episode, Reply, StatefulEnvironment
from rlx_gyms.libraries import NeedsLibrary
from rlx_gyms.textarena.examples import EPISODES
from rlx_gyms.textarena.games import is_invalid, mute, open_game, read_observation

__all__ = ["TextArenaEnvironment"]

_PLAYER, _OPPONENT = 0, 1

_LONGEST = 1000
"""Characters of a move that a game reads: Python refuses to read a number of 5000 digits."""


class TextArenaEnvironment(NeedsLibrary, StatefulEnvironment):
    """Plays the game that the task `textarena` names. A turn is a move, with or without brackets.

    `info` holds `return`, the reward that the game ends with (0 before), `won`, whether that is 1,
    `valid`, whether the move was, and `cut`, whether the game read only its first 1000 characters.
    With `opponent` the model is the first of two players.

    A subclass with a method `rank_moves` of its own is a scripted opponent.
    """

    library: ClassVar[str] = "textarena"

    kinds: ClassVar[tuple[str, ...]] = ("move", "invalid")
    examples: ClassVar[tuple[Episode, ...]] = EPISODES

    opponent: tuple[str, ...] = ()
    """Moves of the other player, such as `["[0]", "[1]"]`: in each turn the first valid one. Empty
    for games of one player."""
    order: Literal["random", "listed"] = "random"
    """The order in which the opponent tries its moves."""
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
        text = action.spans.get(self.span, action.text).strip()
        move = text[:_LONGEST] if "[" in text else f"[{text[:_LONGEST]}]"
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
            info={
                "return": total,
                "won": bool(done) and total >= 1.0,
                "valid": valid,
                "cut": len(text) > _LONGEST,
            },
        )

    def rank_moves(self, observation: str) -> Sequence[str]:
        """Returns moves of the opponent, best first; it makes the first that is valid.

        Args:
            observation: what the game has shown to the opponent since its last move.
        """
        moves = list(self.opponent)
        if self.order == "random":
            random.shuffle(moves)  # the adapter seeds the generator for each rollout
        return moves

    def _answer(self, game: Any) -> bool:
        """Makes the opponent's move; returns whether the game has ended."""
        move, saved = "", pickle.dumps(game)
        for move in self.rank_moves(read_observation(game, _OPPONENT)):
            trial = pickle.loads(saved)
            trial.step(move)
            if not is_invalid(trial, _OPPONENT):
                break
        done, _ = game.step(move)
        return bool(done)


def _get_return(game: Any) -> float:
    """The player's reward; 0 before the end, and where a game sets the reason in its place."""
    value = (game.state.rewards or {}).get(_PLAYER, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
