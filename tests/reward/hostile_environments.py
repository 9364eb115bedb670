"""Environments that misbehave. A module of its own, so that worker processes can import it."""

import os
import time
from typing import ClassVar

from rlx.plugin import Environment, Step


class Misbehaving(Environment):
    """Does what `how` says on turn `on` of the problem `bad`; 0: the reset.

    A rollout lasts three turns; its state is the texts of its turns.
    """

    kinds: ClassVar[tuple[str, ...]] = ("say",)

    how: str = "well"
    on: int = -1

    def reset(self, problem, seed):
        if self.on == 0 and problem["name"] == "bad":
            return MISDEEDS[self.how]()
        return (problem["name"],)

    def step(self, state, action):
        if self.on == action.number and state[0] == "bad":
            return MISDEEDS[self.how]()
        state = (*state, action.text)
        return Step(
            kind="say",
            state=state,
            observation="go on",
            done=action.number == 3,
            info={"turns": len(state) - 1, "process": os.getpid()},
        )


def deep():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def raises():
    raise ValueError("the game is out of order")


def memory():
    return Step(kind="say", observation="x" * 10**10)


MISDEEDS = {
    "raise": raises,
    "exit": lambda: os._exit(3),
    "quit": lambda: exit(0),
    "hang": lambda: time.sleep(600),  # scenario
    "spin": lambda: sum(iter(int, 1)),
    "memory": memory,
    "nonsense": lambda: "a text and no step",
    "deep": lambda: Step(kind="say", info={"a": deep()}),
    "unsendable": lambda: Step(kind="say", state=lambda: None),
}
