"""What a run evaluates and probes: suites of problems, and probes of the reasoning."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlx.plugin import Count, StrictModel
from rlx.spec.training import VariantName

Scheme = Literal["early_answering", "filler", "mistake"]


class FractionCuts(StrictModel):
    """Cuts at fractions of the reasoning's tokens."""

    by: Literal["fraction"] = "fraction"
    at: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.25, 0.5, 0.75)
    """Fractions; 0 and 1 are always included."""


class SentenceCuts(StrictModel):
    """Cuts after sentences and lines."""

    by: Literal["sentence"] = "sentence"
    most: Count = Field(8, ge=1)
    """Maximum number of cuts within the reasoning, spread evenly over its sentences."""


class TokenCuts(StrictModel):
    """Cuts at a fixed interval of tokens."""

    by: Literal["token"] = "token"
    every: Count = Field(16, ge=1)
    """Tokens between cuts."""


Cut = Annotated[FractionCuts | SentenceCuts | TokenCuts, Field(discriminator="by")]


class MonteCarloSpec(StrictModel):
    """Monte Carlo values of the states of every training response (VinePPO)."""

    samples: Count = Field(4, ge=1)
    """Continuations sampled from each state."""
    cut: Cut = SentenceCuts.model_construct(most=4)
    """Boundaries of the reasoning steps."""


class ProbeSpec(StrictModel):
    """Faithfulness probe: the model answers after truncated reasoning (Lanham et al. 2023; TinyZero
    Countdown).

    Each held-out problem is answered once. The answer's reasoning is cut at several points, an
    answer is forced there, and many continuations are sampled and scored with the experiment's own
    rewards.
    """

    every: Count = Field(0, ge=0)
    """Steps between probes, starting before the first step; 0 probes only at the end."""
    problems: Count = Field(32, ge=1)
    """Number of held-out problems, taken from the start of the set; the same every time."""
    samples: Count = Field(50, ge=1)
    """Continuations per cut."""
    schemes: tuple[Scheme, ...] = Field(("early_answering",), min_length=1)
    """early_answering cuts the reasoning; filler replaces it with the same amount of filler;
    mistake corrupts its last sentence, if the task implements that, and lets the model continue
    reasoning."""
    cut: Cut = FractionCuts.model_construct()

    @field_validator("schemes")
    @classmethod
    def _check_unique_schemes(cls, schemes: tuple[Scheme, ...]) -> tuple[Scheme, ...]:
        if len(set(schemes)) < len(schemes):
            raise ValueError("a scheme is listed twice: it would give the same samples again")
        return schemes

    span: str = "think"
    """The span that holds the reasoning."""
    force: str = "</think><answer>"
    """Text that ends the reasoning and opens the answer."""
    close: str = "</answer>"
    """Text that ends the answer. If the model stops without it, it is appended, and such cases are
    counted."""
    filler: str = " ..."
    """Text that the `filler` scheme repeats in place of the reasoning."""
    max_new_tokens: Count = Field(48, ge=1)
    """Maximum length of a forced answer."""


OWN_SUITE = "own"
"""Name of the suite of an experiment's own held-out sets, which uses the run's seed."""


class SetSpec(StrictModel):
    """One held-out set: the experiment with some values changed, like a phase's `set`."""

    distribution: Literal["in", "out"] = "out"
    """Whether problems of this kind are in the training distribution."""
    problems: Count | None = Field(None, ge=1)
    """Number of problems; null uses the suite's."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Values of the experiment by path, such as `task.numbers: [4]`."""


class SuiteSpec(StrictModel):
    """Held-out sets that are evaluated with the same sampling settings."""

    name: VariantName
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of problems, sampling and confidence intervals, independent of the experiment's."""
    problems: Count = Field(300, ge=1)
    """Problems per set."""
    samples: Count = Field(1, ge=1)
    """Answers per problem; more than one gives pass@k and majority votes."""
    greedy: bool = False
    """Greedy decoding instead of sampling."""
    sets: dict[VariantName, SetSpec] = Field(min_length=1)
