"""Rewards for the form of a text: its length and its repetitions."""

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


def _build_text_sample(text: str) -> Sample:
    return Sample(id="a", problem={}, turn="answer", number=1, response=text)


class Repetition(Reward):
    """Penalty for repeated words: minus the share of `n` words in a row that came before.

    0 if all n-grams of a text differ, towards -1 for a text that repeats itself; a text of fewer
    than `n` words has none. Open-R1's penalty, after arXiv 2502.03373, appendix C.2.
    """

    examples = (
        Example(
            name="gold: nothing twice",
            sample=_build_text_sample("a b c d"),
            value=0.0,
            options={"n": 2},
        ),
        Example(
            name="a b, three times",
            sample=_build_text_sample("a b a b A B"),
            value=-0.6,
            options={"n": 2},
        ),
        Example(name="too short", sample=_build_text_sample("a a"), value=0.0, options={"n": 3}),
    )

    n: int = Field(3, ge=1)
    """Words in a row that count as a repetition."""

    def value_range(self) -> tuple[float, float]:
        """Above -1, up to 0."""
        return -1.0, 0.0

    def score(self, sample: Sample) -> Score:
        words = sample.response.lower().split()
        count = len(words) - self.n + 1
        if count <= 0:
            return Score(0.0)
        repeated = count - len({tuple(words[i : i + self.n]) for i in range(count)})
        reason = f"{repeated} of {count} {self.n}-grams came before" if repeated else None
        return Score(-repeated / count, reason)
