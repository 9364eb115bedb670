"""Environments, which answer a policy between its turns."""

import pickle
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlx.plugin.base import Plugin

FAILED = "failed"
"""Kind of a turn that its environment failed to answer; reserved by rlx."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as it was read in a turn of the policy. It is model output and untrusted.

    Attributes:
        name: the tool's name; "" if none could be read.
        arguments: by name.
        fault: why what was written is no call; "" if it is one.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One turn of the policy, as an environment sees it. Its text is model output and untrusted.

    Attributes:
        text: text of this turn only.
        spans: content of each named span that was found.
        number: number of the turn in its rollout, from 1.
        turns_left: regular turns that may follow this one.
        forced: this is the forced answer turn, after the last regular one.
        finish_reason: "stop", or "length" when the token budget ran out.
        player: the player whose turn it is, 0 or 1, in self-play; None where the environment plays
            everyone else.
        calls: with `rollout.tools`, the calls of tools in the turn.
    """

    text: str
    spans: Mapping[str, str] = field(default_factory=dict)
    number: int = 1
    turns_left: int = 0
    forced: bool = False
    finish_reason: str = "stop"
    player: int | None = None
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to an action.

    Attributes:
        kind: kind of the turn: one of the environment's `kinds`.
        state: state for the next step; plain values that can be sent to another process.
        observation: text shown to the policy before its next turn.
        done: whether the rollout has ended.
        info: plain JSON about the turn, recorded with it; rewards read it as `Sample.info`. Its
            booleans, numbers and short words are aggregated over a step's turns.
        anchor: a name for the state in which the next turn begins; turns of one prompt that begin
            in the same state can be compared (GiGPO). None: the observation's tokens decide.
        player: in self-play, the player whose turn is next, 0 or 1. It alone sees `observation`,
            which must therefore hold nothing that is hidden from it.
        opponent_info: in self-play, added to the `info` of the other player's last turn: how the
            game ended for it.
        results: with `rollout.tools`, the text that each call of the turn gave; the policy reads
            them before `observation`.
    """

    kind: str
    state: Any = None
    observation: str = ""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    anchor: str | None = None
    player: int = 0
    opponent_info: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An example rollout with the results that the environment's author promises.

    `rlx plugins check` plays it, and adds its own hostile turns for its problem.

    Attributes:
        name: what it shows, such as "gold" or "out of patience"; unique within an environment.
        problem: the task's record, or as much of it as `reset` reads.
        turns: the policy's turns.
        kinds: the promised kind of each turn.
        done: whether the last turn ends the rollout; no other turn does.
        observations: the promised observation after each turn; empty to promise none.
        spans: tags whose contents `Action.spans` holds.
        options: options of the plugin, as in YAML.
        self_play: whether the turns are those of both players, each of the player whose turn it is.
    """

    name: str
    problem: Mapping[str, Any]
    turns: tuple[str, ...]
    kinds: tuple[str, ...]
    done: bool = True
    observations: tuple[str, ...] = ()
    spans: tuple[str, ...] = ("think", "answer")
    options: Mapping[str, Any] = field(default_factory=dict)
    self_play: bool = False


class Environment(Plugin, ABC):
    """Base of environments. Subclasses implement `reset` and `step` as pure functions.

    rlx stores the state between steps. It calls both methods in worker processes, for all
    unfinished rollouts, and each call has a deadline. Observations of a rollout depend only on its
    problem, its seed and its own turns, not on the rest of the batch.

    Attributes:
        kinds: every kind of turn that `step` may report; `rewards.turn.NAME.turn` names one.
        examples: example rollouts with promised results.
        repeats: name of the `info` value that is true for a turn that repeats an earlier one; ""
            for none. A policy that repeats itself until no turn is left raises an alarm.
        self_play: whether `step` takes the turns of two players, by `Action.player`, and says whose
            turn is next. Player 0 has the first turn of a game, and reads the task's prompt. The
            other's first observation is its prompt.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[Episode, ...]] = ()
    repeats: ClassVar[str] = ""
    self_play: ClassVar[bool] = False

    @abstractmethod
    def reset(self, problem: Mapping[str, Any], seed: int) -> Any:
        """Returns the initial state of a rollout.

        Args:
            problem: the task's record, `Problem.fields`.
            seed: seed of this rollout.
        """

    @abstractmethod
    def step(self, state: Any, action: Action) -> Step:
        """Answers one turn."""


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
