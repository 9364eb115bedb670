"""The environment: it thinks of a number and says where to look for it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field

from rlx.plugin import Action, Environment, Episode, Step

__all__ = ["HIGHER", "LOWER", "UNCLEAR", "Game"]

HIGHER, LOWER, UNCLEAR = "+\n", "-\n", "?\n"
"""What a guess is told. Every tokenizer can write these signs."""

_number = re.compile(r"\s*([0-9]{1,9})\s*").fullmatch


@dataclass(frozen=True, slots=True)
class _State:
    """What a rollout has come to: the secret, and the numbers that it may still be."""

    secret: int
    low: int
    high: int
    wasted: int = 0

    @property
    def anchor(self) -> str:
        """The same where as much is known."""
        return f"{self.low}-{self.high}, {self.wasted}"


def _build_example_episode(
    name: str,
    *guesses: str,
    told: tuple[str, ...] = (),
    done: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Episode:
    """An example in which 7 is to be found."""
    return Episode(
        name=name,
        problem={"low": 1, "high": 12, "secret": 7},
        turns=tuple(f"<answer>{guess}</answer>" for guess in guesses),
        kinds=tuple("guess" if _number(guess) else "unclear" for guess in guesses),
        observations=told,
        done=done,
        options=options or {},
    )


class Game(Environment):
    """Says whether the secret number is higher or lower than the guess between the answer tags."""

    kinds: ClassVar[tuple[str, ...]] = ("guess", "unclear")
    examples: ClassVar[tuple[Episode, ...]] = (
        _build_example_episode("gold", "6", "9", "7", told=(HIGHER, LOWER, "")),
        _build_example_episode("not found", "6", "6", told=(HIGHER, HIGHER), done=False),
        _build_example_episode("out of patience", "seven", "", told=(UNCLEAR, UNCLEAR)),
        _build_example_episode("more patience", "seven", "-7", "7", options={"patience": 3}),
        _build_example_episode("hostile", "7\0", "9" * 100_000),
    )

    patience: int = Field(2, ge=1)
    """Turns without a number that it bears; the last of them ends the rollout."""

    def reset(self, problem: Mapping[str, Any], seed: int) -> _State:
        """Returns the state that a rollout begins in."""
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
        told, state = _compare_guess(state, guess)
        return Step(
            kind="guess",
            state=state,
            observation=told,
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
    """What a guess is told, and what is known after it."""
    if guess < state.secret:
        return HIGHER, replace(state, low=max(state.low, guess + 1))
    if guess > state.secret:
        return LOWER, replace(state, high=min(state.high, guess - 1))
    return "", state
