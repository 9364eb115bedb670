"""Environments, which answer a policy between its turns."""

import random
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from rlx.plugin.base import Plugin

FAILED = "failed"
"""Kind of a turn that its environment failed to answer; reserved by rlx."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as it was read in a turn of the policy: untrusted model output."""

    name: str
    """"" if none could be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    """Why what was written is no call; "" if it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One turn of the policy, as an environment sees it. Its text is model output and untrusted.

    Attributes:
        spans: content of each named span that was found.
        number: from 1.
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
class Reply:
    """What a stateful environment answers to an action.

    Attributes:
        kind: one of the environment's `kinds`.
        observation: text shown to the policy before its next turn.
        info: plain JSON about the turn, recorded with it; rewards read it as `Sample.info`. Its
            booleans, numbers and short words are aggregated over a step's turns.
        anchor: a name for the state in which the next turn begins; turns of one prompt that begin
            in the same state can be compared (GiGPO). None: the observation's tokens decide.
        player: in self-play, the player whose turn is next, 0 or 1. It alone sees `observation`,
            which must therefore hold nothing that is hidden from it.
        opponent_info: in self-play, added to the `info` of the other player's last turn: how the
            game ended for it.
    """

    kind: str
    observation: str = ""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    anchor: str | None = None
    player: int = 0
    opponent_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Reply):
    """An environment's answer to an action: what it replies, and its state.

    Attributes:
        state: state for the next step; plain values that can be sent to another process.
        results: with `rollout.tools`, the text that each call of the turn gave; the policy reads
            them before `observation`.
    """

    state: Any = None
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An example rollout with the results that the environment's author promises.

    `rlx plugins check` plays it, and adds its own hostile turns for its problem.

    Attributes:
        name: what it shows, such as "gold" or "out of patience"; unique within an environment.
        problem: the task's record, or as much of it as `reset` reads.
        kinds: the promised kind of each turn.
        done: whether the last turn ends the rollout; no other turn does.
        observations: the promised observation after each turn; empty to promise none.
        spans: tags whose contents `Action.spans` holds.
        options: of the plugin, as in YAML.
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
        repeats: name of the `info` value that is true for a turn that repeats an earlier one; ""
            for none. A policy that repeats itself until no turn is left raises an alarm.
        self_play: whether `step` takes the turns of two players, by `Action.player`, and says whose
            turn is next. Player 0 has the first turn of a game, and reads the task's prompt. The
            other's first observation is its prompt.
        replayable: always true of pure functions; see `StatefulEnvironment`.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[Episode, ...]] = ()
    repeats: ClassVar[str] = ""
    self_play: ClassVar[bool] = False
    replayable: ClassVar[bool] = True

    @abstractmethod
    def reset(self, problem: Mapping[str, Any], seed: int) -> Any:
        """Returns the initial state of a rollout; `problem` is the task's `Problem.fields`."""

    @abstractmethod
    def step(self, state: Any, action: Action) -> Step:
        """Answers one turn."""

    def release(self, state: Any) -> None:
        """Frees what the last state of a rollout stands for, if it is more than plain values."""
        return


@dataclass(frozen=True, slots=True)
class SessionState:
    """A moment of a live session, as rlx keeps it between turns: all that led to it. `session` is
    its name within the process that holds it."""

    problem: Mapping[str, Any]
    seed: int
    actions: tuple[Action, ...] = ()
    session: str = field(default="", compare=False)


@dataclass(slots=True)
class _Session:
    """A game of this process; `generator` is Python's random state after its last call."""

    environment: "StatefulEnvironment"
    game: Any
    generator: tuple[Any, ...]
    turns: int = 0

    def play(self, action: Action) -> Reply:
        """Plays a turn; a game that fails in it is closed."""
        try:
            with _use_random_state(self.generator):
                reply = self.environment.play(self.game, action)
                self.generator = random.getstate()
        except BaseException:
            self.close()
            raise
        self.turns += 1
        return reply

    def close(self) -> None:
        with _use_random_state(self.generator):
            self.environment.close(self.game)


_sessions: dict[str, _Session] = {}
"""The live sessions of this process."""


def has_sessions() -> bool:
    return bool(_sessions)


def close_sessions() -> None:
    while _sessions:
        _, session = _sessions.popitem()
        try:
            session.close()
        except Exception as error:  # noqa: BLE001  (the process ends, and the game with it)
            sys.stderr.write(f"a session cannot be closed: {type(error).__name__}: {error}\n")


class SessionLostError(Exception):
    """A live session is gone and cannot be replayed."""


class StatefulEnvironment(Environment):
    """Base of environments with a live session: a mutable object, the game. Subclasses write `open`
    and `play`.

    A game lives in one worker process from `open` to `close`, so an episode of n turns makes n
    calls of `play`. Where its process is lost, or a turn is played from an earlier moment, a world
    that is `replayable` is opened again and its turns are replayed; any other loses the rollout.

    Both methods find Python's global random generator seeded for this rollout, because many
    libraries draw from it. Other generators are seeded in `open`.

    Attributes:
        replayable: whether the game's problem, its seed and its turns decide what it answers. A
            world that is not, such as a browser, has a process of its own for every session.
    """

    @abstractmethod
    def open(self, problem: Mapping[str, Any], seed: int) -> Any:
        """Returns a new game, as `reset` a state."""

    @abstractmethod
    def play(self, game: Any, action: Action) -> Reply:
        """Plays one turn, which may change the game, and answers it."""

    def close(self, game: Any) -> None:
        """Frees what the game holds, such as a connection; called once, when the episode is over,
        its rollout is dropped or the run ends, and after `play` has raised."""
        return

    def reset(self, problem: Mapping[str, Any], seed: int) -> SessionState:
        state = SessionState(dict(problem), seed, (), secrets.token_hex(8))
        _sessions[state.session] = self._open(problem, seed)
        return state

    def step(self, state: SessionState, action: Action) -> Step:
        """Plays one turn, and closes the session if that ends the episode; raises SessionLostError
        if the session is not at this moment and cannot be replayed."""
        name, session = state.session, _sessions.pop(state.session, None)
        if session is None:
            session = self._replay(state)
        elif session.turns != len(state.actions):  # it has gone on: this turn begins a branch
            _sessions[name] = session
            name, session = secrets.token_hex(8), self._replay(state)
        reply = session.play(action)
        done = reply.done or action.forced
        if done:
            session.close()
        else:
            _sessions[name] = session
        replied = {one.name: getattr(reply, one.name) for one in fields(Reply)}
        after = SessionState(state.problem, state.seed, (*state.actions, action), name)
        return Step(**{**replied, "state": after, "done": done})

    def release(self, state: SessionState) -> None:
        if (session := _sessions.pop(state.session, None)) is not None:
            session.close()

    def _open(self, problem: Mapping[str, Any], seed: int) -> _Session:
        with _use_random_state(random.Random(seed).getstate()):
            return _Session(self, self.open(problem, seed), random.getstate())

    def _replay(self, state: SessionState) -> _Session:
        if not self.replayable:
            raise SessionLostError(
                "its session is lost, and the environment does not say that it is replayable"
            )
        session = self._open(state.problem, state.seed)
        for action in state.actions:
            session.play(action)
        return session


@contextmanager
def _use_random_state(state: tuple[Any, ...]) -> Iterator[None]:
    before = random.getstate()
    random.setstate(state)
    try:
        yield
    finally:
        random.setstate(before)
