"""The task of the game: secret numbers, and a scripted policy of mixed quality."""

import hashlib
import random
from collections.abc import Sequence

from pydantic import Field

from rlx.plugin import Demonstration, Plugin, Problem, Split
from rlx_guess.game import HIGHER, LOWER

_TESTED = 5  # one in five ranges is for testing


class GuessTask(Plugin):
    """A secret number within bounds given in the prompt. Train and test have different bounds."""

    largest: int = Field(60, ge=20, le=100)
    """Largest upper bound."""
    size: int = Field(12, ge=4, le=16)
    """Maximum count of numbers within the bounds; the minimum is 4."""
    halving: float = Field(0.4, ge=0, le=1)
    """Share of the warm start's guesses that bisect the remaining range; the others are random
    within the bounds of the prompt."""

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index`; the same for the same arguments."""
        rng = random.Random(f"guess/{seed}/{split}/{index}")
        while True:
            size = rng.randint(4, self.size)
            low = rng.randint(1, self.largest - size + 1)
            high = low + size - 1
            digest = hashlib.sha256(f"{low}-{high}".encode()).digest()
            if (digest[0] % _TESTED == 0) == (split == "test"):
                break
        secret = rng.randint(low, high)
        return Problem(
            id=f"guess/{low}-{high}/{secret}",
            prompt=f"{low}-{high}?\n",
            fields={"low": low, "high": high, "secret": secret, "data_source": "guess"},
        )

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns the turns of a game that finds the number, for schedules without environment."""
        turns: list[str] = []
        observations: list[str] = []
        while True:
            turns.append(self.act(problem, turns, observations, seed))
            guess = _parse_guess(turns[-1])
            if guess == problem.fields["secret"]:
                return Demonstration(tuple(turns))
            observations.append(HIGHER if guess < problem.fields["secret"] else LOWER)

    def lesson(self, index: int, seed: int) -> Problem:
        """Returns problem number `index` of the warm start."""
        return self.problem("train", index, seed)

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        """Returns the next guess."""
        rng = random.Random(f"guess/act/{seed}/{len(turns)}")
        low, high = problem.fields["low"], problem.fields["high"]
        guess = rng.randint(low, high)
        if rng.random() < self.halving:
            low, high = _narrow_bounds(low, high, turns, observations)
            guess = (low + high) // 2
        return f"<answer>{guess}</answer>"


def _narrow_bounds(
    low: int, high: int, turns: Sequence[str], observations: Sequence[str]
) -> tuple[int, int]:
    """The bounds after narrowing by the observations."""
    for turn, observation in zip(turns, observations, strict=True):
        guess = _parse_guess(turn)
        if observation == HIGHER:
            low = max(low, guess + 1)
        elif observation == LOWER:
            high = min(high, guess - 1)
    return low, high


def _parse_guess(turn: str) -> int:
    return int(turn.removeprefix("<answer>").removesuffix("</answer>"))
