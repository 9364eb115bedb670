"""An adapter for environments that live in an object and change it, as those of most libraries."""

import pickle
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlx.plugin.environment import Action, Environment, Step

__all__ = ["Reply", "StatefulEnvironment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a stateful environment answers to an action: a `Step` without its state.

    Attributes:
        kind, observation, done, info, anchor, player, opponent_info: as in `Step`.
    """

    kind: str
    observation: str = ""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    anchor: str | None = None
    player: int = 0
    opponent_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A game between two turns.

    Attributes:
        problem, seed: the arguments of `reset`.
        actions: all turns so far.
        game: the pickled game with the state of Python's random generator; None if the game cannot
            be pickled or is too large. It is then opened again and the actions are replayed.
    """

    problem: Mapping[str, Any]
    seed: int
    actions: tuple[Action, ...] = ()
    game: bytes | None = None


class StatefulEnvironment(Environment):
    """Base of environments around a mutable object, the game. Subclasses write `open` and `play`.

    rlx keeps a rollout's state, not the worker: between turns the game is pickled, or, where it
    cannot be, opened again and its turns replayed. So every worker can continue every rollout, and
    one that was ended at its deadline or has crashed costs only the call that ended it.

    Both methods find Python's global random generator seeded for this rollout, because many
    libraries draw from it. Other generators are seeded in `open`. `play` must not read a clock.
    """

    max_pickle: ClassVar[int] = 1_000_000
    """Largest pickled game in bytes; larger ones are replayed."""

    @abstractmethod
    def open(self, problem: Mapping[str, Any], seed: int) -> Any:
        """Returns a new game.

        Args:
            problem: the task's record, `Problem.fields`.
            seed: seed of this rollout.
        """

    @abstractmethod
    def play(self, game: Any, action: Action) -> Reply:
        """Plays one turn, which may change the game, and answers it."""

    def close(self, game: Any) -> None:
        """Frees what the game holds, such as a connection; called after every call of rlx."""
        return

    def reset(self, problem: Mapping[str, Any], seed: int) -> Any:
        """Opens a game and saves it."""
        saved = _Saved(dict(problem), seed)
        with _use_random_state(random.Random(seed).getstate()):
            game = self.open(problem, seed)
            try:
                return _Saved(saved.problem, seed, (), self._pickle(game))
            finally:
                self.close(game)

    def step(self, state: Any, action: Action) -> Step:
        """Restores the game, plays one turn, and saves it again."""
        with _use_random_state(random.Random(state.seed).getstate()):
            game = self._restore(state)
            try:
                reply = self.play(game, action)
                actions = (*state.actions, action)
                kept = None if reply.done else self._pickle(game)
            finally:
                self.close(game)
        return Step(
            kind=reply.kind,
            state=_Saved(state.problem, state.seed, actions, kept),
            observation=reply.observation,
            done=reply.done or action.forced,
            info=reply.info,
            anchor=reply.anchor,
            player=reply.player,
            opponent_info=reply.opponent_info,
        )

    def _restore(self, state: _Saved) -> Any:
        if state.game is not None:
            game, generator = pickle.loads(state.game)
            random.setstate(generator)
            return game
        game = self.open(state.problem, state.seed)
        for action in state.actions:
            self.play(game, action)
        return game

    def _pickle(self, game: Any) -> bytes | None:
        try:
            pickled = pickle.dumps((game, random.getstate()), pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError):
            return None
        return pickled if len(pickled) <= self.max_pickle else None


@contextmanager
def _use_random_state(state: tuple[Any, ...]) -> Iterator[None]:
    """Lends Python's global random generator to a game, and restores it afterwards."""
    before = random.getstate()
    random.setstate(state)
    try:
        yield
    finally:
        random.setstate(before)
