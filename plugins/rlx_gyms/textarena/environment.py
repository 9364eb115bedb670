"""The environment `textarena`: a game, played alone or against an opponent."""

import pickle
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from rlx.plugin import Action, Episode, Reply, StatefulEnvironment
from rlx_gyms.libraries import NeedsLibrary
from rlx_gyms.textarena.examples import EPISODES
from rlx_gyms.textarena.games import (
    is_invalid,
    mute,
    open_game,
    read_observation,
    reword_observation,
)

__all__ = ["TextArenaEnvironment"]

_LONGEST = 1000
"""Characters of a move that a game reads: Python refuses to read a number of 5000 digits."""


class TextArenaEnvironment(NeedsLibrary, StatefulEnvironment):
    """Plays the game that the task `textarena` names. A turn is a move, with or without brackets.

    `info` holds `return`, the reward that the game ends with (0 before), `won`, whether that is 1,
    `valid`, whether the move was, and `cut`, whether the game read only its first 1000 characters.
    With `opponent` the model is the first of two players; in self-play it is both, and `opponent`
    plays held-out games.

    A subclass with a method `rank_moves` of its own is a scripted opponent.
    """

    library: ClassVar[str] = "textarena"

    kinds: ClassVar[tuple[str, ...]] = ("move", "invalid")
    self_play: ClassVar[bool] = True
    examples: ClassVar[tuple[Episode, ...]] = EPISODES

    opponent: tuple[str, ...] = ()
    """Moves of the other player, such as `["[0]", "[1]"]`: in each turn the first valid one. Empty
    for games of one player."""
    order: Literal["random", "listed"] = "random"
    """The order in which the opponent tries its moves."""
    second_prompt: str = "{observation}"
    """In self-play, how the game's beginning is shown to the second player, as the task's `prompt`
    does for the first; `{observation}` is what the game shows it before the first move."""
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
        read_observation(game, game.first_player)
        return game

    def play(self, game: Any, action: Action) -> Reply:
        """Makes one move, and outside self-play the opponent's after it."""
        text = action.spans.get(self.span, action.text).strip()
        move = text[:_LONGEST] if "[" in text else f"[{text[:_LONGEST]}]"
        alone, first = action.player is None, game.first_player
        mover = first if action.player in (None, 0) else 1 - first
        if not alone and mover == first and action.number == 1:
            reword_observation(game, 1 - first, self.second_prompt)
        with mute():
            done, _ = game.step(move)
            valid = not is_invalid(game, mover)
            while alone and not done and game.state.current_player_id != first:
                done = self._answer(game)
        reader = mover if alone or done else game.state.current_player_id
        return Reply(
            kind="move" if valid else "invalid",
            observation=read_observation(game, reader),
            done=bool(done),
            info={
                **_build_result(game, mover, done=bool(done)),
                "valid": valid,
                "cut": len(text) > _LONGEST,
            },
            player=int(reader != first),
            opponent_info={} if alone else _build_result(game, 1 - mover, done=bool(done)),
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
        move, saved, opponent = "", pickle.dumps(game), 1 - game.first_player
        for move in self.rank_moves(read_observation(game, opponent)):
            trial = pickle.loads(saved)
            trial.step(move)
            if not is_invalid(trial, opponent):
                break
        done, _ = game.step(move)
        return bool(done)


def _build_result(game: Any, player: int, *, done: bool) -> dict[str, Any]:
    total = _get_return(game, player)
    return {"return": total, "won": done and total >= 1.0}


def _get_return(game: Any, player: int) -> float:
    """A player's reward; 0 before the end, and where a game sets the reason in its place."""
    value = (game.state.rewards or {}).get(player, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
