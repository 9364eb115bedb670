"""The environment of the game, which answers guesses with higher or lower."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field

from rlx.plugin import Action, Environment, Episode, Step

HIGHER, LOWER, UNCLEAR = "+\n", "-\n", "?\n"
"""Observations after a guess; every tokenizer can encode these signs."""

_number = re.compile(r"\s*([0-9]{1,9})\s*").fullmatch


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a rollout: the secret, and the bounds of the remaining numbers."""

    secret: int
    low: int
    high: int
    wasted: int = 0

    @property
    def anchor(self) -> str:
        """Equal for states with the same knowledge."""
        return f"{self.low}-{self.high}, {self.wasted}"


def _build_example_episode(
    name: str,
    *guesses: str,
    observations: tuple[str, ...] = (),
    done: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Episode:
    """An example with the secret number 7."""
    return Episode(
        name=name,
        problem={"low": 1, "high": 12, "secret": 7},
        turns=tuple(f"<answer>{guess}</answer>" for guess in guesses),
        kinds=tuple("guess" if _number(guess) else "unclear" for guess in guesses),
        observations=observations,
        done=done,
        options=options or {},
    )


class Game(Environment):
    """Answers whether the secret number is higher or lower than the guess in the answer tags."""

    kinds: ClassVar[tuple[str, ...]] = ("guess", "unclear")
    examples: ClassVar[tuple[Episode, ...]] = (
        _build_example_episode("gold", "6", "9", "7", observations=(HIGHER, LOWER, "")),
        _build_example_episode("not found", "6", "6", observations=(HIGHER, HIGHER), done=False),
        _build_example_episode("out of patience", "seven", "", observations=(UNCLEAR, UNCLEAR)),
        _build_example_episode("more patience", "seven", "-7", "7", options={"patience": 3}),
        _build_example_episode("hostile", "7\0", "9" * 100_000),
    )

    patience: int = Field(2, ge=1)
    """Number of turns without a number after which the rollout ends."""

    def reset(self, problem: Mapping[str, Any], seed: int) -> _State:
        """Returns the initial state of a rollout."""
        return _State(problem["secret"], problem["low"], problem["high"])

    def step(self, state: _State, action: Action) -> Step:
        """Answers a guess."""
        read = _number(action.spans.get("answer", ""))
        if read is None:
            state = replace(state, wasted=state.wasted + 1)
            done = action.forced or state.wasted >= self.patience
            return Step(
                kind="unclear",
                state=state,
                observation=UNCLEAR,
                done=done,
                info={"found": False, "sensible": False, "wasted": state.wasted},
                anchor=state.anchor,
            )
        guess = int(read[1])
        found, sensible = guess == state.secret, state.low <= guess <= state.high
        observation, state = _compare_guess(state, guess)
        return Step(
            kind="guess",
            state=state,
            observation=observation,
            done=found or action.forced,
            info={
                "guess": guess,
                "found": found,
                "sensible": sensible,
                "wasted": state.wasted,
            },
            anchor=state.anchor,
        )


def _compare_guess(state: _State, guess: int) -> tuple[str, _State]:
    """The observation after a guess, and the new state."""
    if guess < state.secret:
        return HIGHER, replace(state, low=max(state.low, guess + 1))
    if guess > state.secret:
        return LOWER, replace(state, high=min(state.high, guess - 1))
    return "", state
