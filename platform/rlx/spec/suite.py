"""What an evaluation suite may say: sets of held-out problems, near and far from what was trained.

name: shifted
problems: 300
samples: 8
sets:
  same: {distribution: in}
  four: {distribution: out, set: {task.numbers: [4]}}
"""

from typing import Any, Literal

from pydantic import Field

from rlx.spec.base import StrictModel
from rlx.spec.training import VariantName

__all__ = ["OWN_SUITE", "SetSpec", "SuiteSpec"]

OWN_SUITE = "own"
"""Name of the suite of an experiment's own sets, whose seed is the run's."""


class SetSpec(StrictModel):
    """One set: the experiment with some values changed, as a phase changes them."""

    distribution: Literal["in", "out"] = "out"
    """Whether training has seen problems of this kind."""
    problems: int | None = Field(None, ge=1)
    """Another number than the suite's."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Values of the experiment by their paths, such as `task.numbers: [4]`."""


class SuiteSpec(StrictModel):
    """Sets that are answered in one way."""

    name: VariantName
    seed: int = Field(0, ge=0, lt=2**31)
    """Of problems, sampling and intervals, whatever the experiment's."""
    problems: int = Field(300, ge=1)
    """Of every set."""
    samples: int = Field(1, ge=1)
    """Answers to every problem; several give pass@k and votes."""
    greedy: bool = False
    """Each token the most likely."""
    sets: dict[VariantName, SetSpec] = Field(min_length=1)
