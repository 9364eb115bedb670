"""A small policy over pieces of text, trained by REINFORCE to be paid.

Its logits depend on the position and on the previous piece. A few hundred calls of a reward train
it, which needs neither a model nor torch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PiecePolicy", "compute_policy_gradient"]

_Logits = NDArray[np.float64]
_Choices = NDArray[np.int64]


@dataclass(eq=False)
class PiecePolicy:
    """Logits of the next piece; the last piece ends the text.

    Attributes:
        by_position: `[length, pieces]`.
        by_previous: `[pieces + 1, pieces]`; the last row is the beginning of the text.
    """

    by_position: _Logits
    by_previous: _Logits

    @classmethod
    def build_uniform(cls, pieces: int, length: int) -> "PiecePolicy":
        """Returns the policy that draws every piece alike."""
        return cls(np.zeros((length, pieces)), np.zeros((pieces + 1, pieces)))

    def compute_probabilities(self, choices: _Choices) -> _Logits:
        """`[count, length, pieces]` of every next piece, given `[count, length]` choices."""
        begin = np.full((len(choices), 1), len(self.by_previous) - 1)
        previous = np.concatenate([begin, choices[:, :-1]], axis=1)
        logits = self.by_position[None] + self.by_previous[previous]
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares: _Logits = weights / weights.sum(axis=-1, keepdims=True)
        return shares

    def sample_choices(self, count: int, rng: np.random.Generator) -> _Choices:
        """`[count, length]` numbers of pieces, drawn from left to right."""
        length, pieces = self.by_position.shape
        choices = np.zeros((count, length), dtype=np.int64)
        for position in range(length):
            shares = self.compute_probabilities(choices)[:, position].cumsum(axis=-1)
            drawn = rng.random((count, 1))
            choices[:, position] = np.minimum((shares < drawn).sum(axis=-1), pieces - 1)
        return choices

    def apply_gradient(
        self, choices: _Choices, gradient: _Logits, learning_rate: float
    ) -> "PiecePolicy":
        """Returns the policy after one step up the gradient of its logits."""
        by_position = self.by_position + learning_rate * gradient.sum(axis=0)
        by_previous = self.by_previous.copy()
        begin = np.full((len(choices), 1), len(self.by_previous) - 1)
        previous = np.concatenate([begin, choices[:, :-1]], axis=1)
        np.add.at(by_previous, previous, learning_rate * gradient)
        return PiecePolicy(by_position, by_previous)


def compute_policy_gradient(
    probabilities: _Logits, choices: _Choices, rewards: _Logits, ends: int
) -> _Logits:
    """`[count, length, pieces]` gradient of the expected reward by the logits, one term per choice.

    REINFORCE with the mean as baseline: `(R - mean R) / count · (1[piece chosen] - p)`, up to and
    including the piece `ends`.

    Args:
        probabilities: `[count, length, pieces]` at the time of the draw.
        choices: `[count, length]` numbers of pieces.
        rewards: `[count]`.
        ends: number of the piece that ends a text.
    """
    chosen = np.eye(probabilities.shape[-1])[choices]
    ended_before = np.cumsum(choices == ends, axis=1) - (choices == ends) > 0
    advantages = (rewards - rewards.mean()) / len(rewards)
    weights = np.where(ended_before, 0.0, advantages[:, None])
    gradient: _Logits = weights[..., None] * (chosen - probabilities)
    return gradient
