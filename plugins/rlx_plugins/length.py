"""Rewards for length."""

from pydantic import Field, model_validator

from rlx.plugin import Example, Reward, Sample, Score


def _build_length_sample(n_tokens: int) -> Sample:
    return Sample(id="a", problem={}, turn="answer", number=1, response="", n_tokens=n_tokens)


_SIZES = {"limit": 20, "buffer": 8}


class Overlong(Reward):
    """Soft penalty for long turns: 0 up to `limit - buffer` tokens, falling to -1 at `limit`.

    DAPO, arXiv 2503.14476, section 3.4, equation 13.
    """

    examples = (
        Example(name="gold: short", sample=_build_length_sample(12), value=0.0, options=_SIZES),
        Example(name="in the buffer", sample=_build_length_sample(16), value=-0.5, options=_SIZES),
        Example(name="too long", sample=_build_length_sample(21), value=-1.0, options=_SIZES),
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
