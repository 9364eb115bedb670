"""Environments that run in another process or on another machine.

A subclass of `RemoteEnvironment` says how an episode is opened there. The rest is one adapter:
text in, observation and reward out, faults with the name of whom they come from.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

from pydantic import Field

from rlx.plugin import Action, Reply, StatefulEnvironment

__all__ = [
    "LONGEST_MESSAGE",
    "RemoteEnvironment",
    "RemoteFault",
    "RemoteReply",
    "RemoteSession",
    "read_message",
    "read_number",
]

LONGEST_MESSAGE = 1_000_000
"""Longest message in bytes that is read from the other side."""


class RemoteFault(Exception):
    """The other side fails: it is not there, too slow, or answers what cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReply:
    """What the other side answers.

    Attributes:
        observation: the text for the model.
        reward: the reward of the turn.
        done: whether the episode has ended.
        valid: whether it could read the turn.
        info: further numbers, recorded under their names.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    valid: bool = True
    info: Mapping[str, float | bool] = field(default_factory=dict)


class RemoteSession(Protocol):
    """An episode on the other side. One that can be pickled is not replayed."""

    def reset(self) -> RemoteReply:
        """Begins the episode."""
        ...

    def step(self, text: str) -> RemoteReply:
        """Plays a turn."""
        ...

    def close(self) -> None:
        """Frees what the session holds."""
        ...


@dataclass(slots=True)
class _RemoteGame:
    session: RemoteSession
    total: float = 0.0


class RemoteEnvironment(StatefulEnvironment):
    """Base of environments on the other side of a connection. Subclasses write `connect`.

    `info` holds the `reward` of the turn, the `return` so far, `valid`, and the numbers that the
    other side reports.
    """

    kinds: ClassVar[tuple[str, ...]] = ("turn", "invalid")

    span: str = "answer"
    """The span that is sent; without it the whole turn is."""
    timeout: float = Field(4.0, gt=0)
    """Seconds for an answer. Below the `deadline`, so that a fault names the other side."""

    @abstractmethod
    def connect(self, problem: Mapping[str, Any]) -> RemoteSession:
        """Returns a session of the problem that has not begun."""

    def open(self, problem: Mapping[str, Any], seed: int) -> _RemoteGame:
        """Begins the problem's episode; what it shows first is in the prompt."""
        game = _RemoteGame(self.connect(problem))
        try:
            game.session.reset()
        except BaseException:
            game.session.close()
            raise
        return game

    def play(self, game: _RemoteGame, action: Action) -> Reply:
        """Sends a turn."""
        text = action.spans.get(self.span, action.text)
        reply = game.session.step(text.encode(errors="replace").decode())
        game.total += reply.reward
        return Reply(
            kind="turn" if reply.valid else "invalid",
            observation=reply.observation,
            done=reply.done,
            info={
                **reply.info,
                "reward": reply.reward,
                "return": game.total,
                "valid": reply.valid,
            },
        )

    def close(self, game: _RemoteGame) -> None:
        """Ends the session."""
        game.session.close()


def read_message(text: str | bytes, sender: str) -> Mapping[str, Any]:
    """Returns a JSON object that was received.

    Raises:
        RemoteFault: it is no JSON object of finite numbers.
    """
    try:
        message = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RemoteFault(f"{sender} sent invalid JSON: {error}") from None
    if not isinstance(message, dict):
        raise RemoteFault(f"{sender} sent {type(message).__name__}, not an object")
    return message


def read_number(value: Any, name: str, sender: str) -> float:
    """Returns a number that was received; nothing is 0.

    Raises:
        RemoteFault: it is something else.
    """
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RemoteFault(f"{sender} sent {value!r:.40} as {name}, not a number")
    return float(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
