"""Advantage estimators that rlx ships: descriptors, found through `rlx.estimators`."""

from typing import ClassVar, Literal

from pydantic import Field

from rlx.plugin import Estimator
from rlx.spec.base import Strict

__all__ = ["Confidence", "Grpo", "Normalize", "Singleton", "TwoLevel"]

Normalize = Literal["std", "center"]
Singleton = Literal["zero", "raw"]


class Grpo(Estimator):
    """Score minus the mean of its group, over the group's deviation unless only centred."""

    implementation: ClassVar[str] = "rlx.credit:grpo"

    normalize: Normalize = "std"
    ddof: Literal[0, 1] = 1
    """1 divides the variance by n - 1, 0 by n."""
    eps: float = Field(1e-6, ge=0)
    """Added to the deviation."""
    singleton: Singleton = "zero"
    """Advantage in a group of one: 0, or the raw score."""

    def compares(self, turn: str) -> bool:
        return self.singleton == "zero"


class Confidence(Strict):
    """How confidences are compared with their siblings, the confidences of the same answer."""

    normalize: Normalize = "center"
    ddof: Literal[0, 1] = 1
    eps: float = Field(1e-6, ge=0)
    singleton: Singleton = "zero"


class TwoLevel(Estimator):
    """Answers compared within their prompt, confidences within their own answer (design 004)."""

    implementation: ClassVar[str] = "rlx.credit:two_level"

    normalize: Normalize = "std"
    ddof: Literal[0, 1] = 1
    eps: float = Field(1e-6, ge=0)
    singleton: Singleton = "zero"
    confidence: Confidence = Confidence.model_construct()
    lambda_ans: float = 1.0
    """Multiplies the advantages of answers."""
    lambda_conf: float = 1.0
    """Multiplies the advantages of confidences; about 4 makes up for centring."""

    def compares(self, turn: str) -> bool:
        level = self.confidence if turn == "confidence" else self
        return level.singleton == "zero"

    def warnings(self) -> tuple[str, ...]:
        if self.confidence.normalize == "center":
            return ()
        return (
            "estimator.confidence.normalize is 'std': siblings share one label, so σ cancels the "
            "size of the Brier gradient and pushes confidences to 0 or 1 (arXiv 2508.11800); "
            "'center' keeps them calibrated",
        )
