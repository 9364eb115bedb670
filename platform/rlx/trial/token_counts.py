"""Numbers of tokens in one training step. Nothing here imports torch."""

from dataclasses import dataclass

__all__ = ["LevelTokens", "TokenBudget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTokens:
    """Tokens of one turn level in a step; with an environment, of one turn number.

    Attributes:
        kind: kind of turn.
        turns: turns sampled per step; with an environment, as many as the synthetic rollouts have.
        openings: prompts, questions or observations that precede these turns, per step.
        opening: mean tokens of one of them.
        made_up: mean tokens of a synthetic turn.
        at_most: `max_new_tokens`.
    """

    kind: str
    turns: int
    openings: int
    opening: float
    made_up: float
    at_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Tokens of one step. Pairs are (with synthetic lengths, upper bound).

    Attributes:
        levels: turn levels, first turn first.
        sampled: tokens that the policy samples.
        rows: tokens the learner would process if every row repeated its own context.
        shared: tokens the learner processes, with each shared prefix counted once.
    """

    levels: tuple[LevelTokens, ...]
    sampled: tuple[float, float]
    rows: tuple[float, float]
    shared: tuple[float, float]

    @property
    def longest(self) -> float:
        """Tokens of a dialogue with turns at their limit and openings of synthetic length."""
        return sum(level.opening + level.at_most for level in self.levels)
