"""Evaluation suites: sets of held-out problems, in and out of the training distribution.

name: shifted
problems: 300
samples: 8
sets:
  same: {distribution: in}
  four: {distribution: out, set: {task.numbers: [4]}}
"""

from typing import Any, Literal

from pydantic import Field

from rlx.spec.base import Count, StrictModel
from rlx.spec.training import VariantName

__all__ = ["OWN_SUITE", "SetSpec", "SuiteSpec"]

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
