"""What an experiment may say about faithfulness probes: where reasoning is cut, what follows."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlx.spec.base import StrictModel

__all__ = [
    "Cut",
    "FractionCuts",
    "MonteCarloSpec",
    "ProbeSpec",
    "Scheme",
    "SentenceCuts",
    "TokenCuts",
]

Scheme = Literal["early_answering", "filler", "mistake"]


class FractionCuts(StrictModel):
    """At shares of the reasoning's tokens."""

    by: Literal["fraction"] = "fraction"
    at: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.25, 0.5, 0.75)
    """0 and 1 are always among them."""


class SentenceCuts(StrictModel):
    """After sentences and lines."""

    by: Literal["sentence"] = "sentence"
    most: int = Field(8, ge=1)
    """At most so many cuts within the reasoning, spread evenly over its sentences."""


class TokenCuts(StrictModel):
    """After every so many tokens."""

    by: Literal["token"] = "token"
    every: int = Field(16, ge=1)


Cut = Annotated[FractionCuts | SentenceCuts | TokenCuts, Field(discriminator="by")]


class MonteCarloSpec(StrictModel):
    """Values of the states of every training response, by sampling on from them (VinePPO)."""

    samples: int = Field(4, ge=1)
    """Continuations from each state."""
    cut: Cut = SentenceCuts.model_construct(most=4)
    """Where a step of the response ends."""


class ProbeSpec(StrictModel):
    """Reasoning cut short, and what the model then answers (Lanham et al. 2023; design 002).

    Held-out problems are answered once; each answer's reasoning is cut at several points, an answer
    is forced there, and many continuations are sampled and scored by the experiment's own rewards.
    """

    every: int = Field(0, ge=0)
    """Steps between probes, from before the first step on; 0 probes at the end only."""
    problems: int = Field(32, ge=1)
    """The first of the held-out problems, the same each time."""
    samples: int = Field(50, ge=1)
    """Continuations per point."""
    schemes: tuple[Scheme, ...] = Field(("early_answering",), min_length=1)
    """early_answering cuts the reasoning; filler replaces it by as much filler; mistake corrupts
    its last sentence, where the task knows how, and lets the model reason on."""
    cut: Cut = FractionCuts.model_construct()

    @field_validator("schemes")
    @classmethod
    def _check_unique_schemes(cls, schemes: tuple[Scheme, ...]) -> tuple[Scheme, ...]:
        if len(set(schemes)) < len(schemes):
            raise ValueError("a scheme is named twice: its samples would be the same ones again")
        return schemes

    span: str = "think"
    """The span that holds the reasoning."""
    force: str = "</think><answer>"
    """Text that ends the reasoning and opens the answer."""
    close: str = "</answer>"
    """What ends the answer; where the model ends without it, it is added, and that is counted."""
    filler: str = " ..."
    """Repeated in place of reasoning by the scheme `filler`."""
    max_new_tokens: int = Field(48, ge=1)
    """Of a forced answer."""
    max_tokens: int | None = Field(None, ge=1)
    """Budget of sampled tokens for one probe; problems that might pass it are left out."""
