"""Rewards for the form of a text: its length and its repetitions."""

from pydantic import Field, model_validator

from rlx.plugin import Reward, Sample, Score
from rlx_plugins.examples import build_example

_SIZES = {"limit": 20, "buffer": 8}


class Overlong(Reward):
    """Soft penalty for long turns: 0 up to `limit - buffer` tokens, falling to -1 at `limit`.

    DAPO, arXiv 2503.14476, section 3.4, equation 13.
    """

    examples = (
        build_example("gold: short", 0.0, n_tokens=12, options=_SIZES),
        build_example("in the buffer", -0.5, n_tokens=16, options=_SIZES),
        build_example("too long", -1.0, n_tokens=21, options=_SIZES),
    )

    limit: int = Field(ge=1)
    """Tokens at which the penalty is full."""
    buffer: int = Field(ge=1)
    """Tokens below the limit over which the penalty grows."""

    @model_validator(mode="after")
    def _fits(self) -> "Overlong":
        if self.buffer > self.limit:
            raise ValueError(f"buffer {self.buffer} is more than limit {self.limit}")
        return self

    def score(self, sample: Sample) -> Score:
        over = sample.n_tokens - (self.limit - self.buffer)
        if over <= 0:
            return Score(0.0)
        return Score(-min(over / self.buffer, 1.0), f"{over} tokens into the buffer")


class Repetition(Reward):
    """Penalty for repeated words: minus the share of `n` words in a row that came before.

    0 if all n-grams of a text differ, towards -1 for a text that repeats itself; a text of fewer
    than `n` words has none. Open-R1's penalty, after arXiv 2502.03373, appendix C.2.
    """

    examples = (
        build_example("gold: nothing twice", 0.0, "a b c d", options={"n": 2}),
        build_example("a b, three times", -0.6, "a b a b A B", options={"n": 2}),
        build_example("too short", 0.0, "a a", options={"n": 3}),
    )

    n: int = Field(3, ge=1)
    """Words in a row that count as a repetition."""

    def value_range(self) -> tuple[float, float]:
        return -1.0, 0.0

    def score(self, sample: Sample) -> Score:
        words = sample.response.lower().split()
        count = len(words) - self.n + 1
        if count <= 0:
            return Score(0.0)
        repeated = count - len({tuple(words[i : i + self.n]) for i in range(count)})
        reason = f"{repeated} of {count} {self.n}-grams came before" if repeated else None
        return Score(-repeated / count, reason)
